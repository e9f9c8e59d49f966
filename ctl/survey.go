package ctl

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/inspectpb"
)

// survey is all that doctor has learned; checks.go judges it. Fields are nil or zero where something could not be learned, and
// skipped tells why.
type survey struct {
	now     time.Time
	tool    string
	reached []*reach // of --endpoints
	members []*memberReport
	skipped []string

	ownCertificate *x509.Certificate // of --cert
	quorumErr      error             // of a read that needs a quorum
	alarms         []*pb.AlarmMember
	authOn         *bool
	keys           int64
	leases         int
	largest        []*inspectpb.UsageRow // keys
	crowded        []*inspectpb.UsageRow // prefixes, by keys
	total          *inspectpb.Measure
	loginErr       error
}

// memberReport is what is known of one member.
type memberReport struct {
	member   *pb.Member // nil if no list of members could be had
	id       uint64
	name     string
	endpoint string
	reach    *reach
	client   *clientv3.Client

	status     *pb.StatusResponse
	statusErr  error
	metricsErr error
	stranger   uint64 // another member than this, that its URL leads to
	engram     bool
	metrics    metricSet
	clock      *clockReading
	hash       *pb.HashKVResponse
	top        *inspectpb.TopResponse
}

// clockReading is how far a member's clock is ahead of ours, within a precision.
type clockReading struct{ ahead, precision time.Duration }

func (m *memberReport) String() string {
	switch {
	case m.name != "" && m.endpoint != "":
		return fmt.Sprintf("member %s (%s)", m.name, m.endpoint)
	case m.name != "":
		return "member " + m.name
	case m.endpoint != "":
		return m.endpoint
	}
	return fmt.Sprintf("member %x", m.id)
}

// skip notes what was not looked at, and why, once.
func (s *survey) skip(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(s.skipped, text) {
		s.skipped = append(s.skipped, text)
	}
}

// surveyor gathers a survey.
type surveyor struct {
	*survey
	t   *tool
	p   *prober
	cfg clientv3.Config
	doctorFlags
}

const (
	// hashBytes is up to which size stores are hashed without being asked to: some seconds.
	hashBytes = 1 << 30
	// clockAsks is how often a clock is asked; the quickest answer counts.
	clockAsks = 5
	// manyRows is how many rows are asked for of lists of which the largest are told.
	manyRows = 20
)

// gather learns what there is to know. It never fails: what cannot be learned is missing.
func (s *surveyor) gather(ctx context.Context) {
	s.readOwnCertificate()
	s.reached = s.p.lookAll(ctx, s.cfg.Endpoints)
	var usable []string
	for _, r := range s.reached {
		if r.usable {
			usable = append(usable, r.endpoint)
		}
	}
	if len(usable) == 0 {
		return
	}
	s.meet(ctx, usable)
	s.each(func(m *memberReport) { s.examine(ctx, m) })
	if s.loginErr != nil {
		return
	}
	s.askCluster(ctx)
	s.compareHashes(ctx)
}

// each runs fn for all members side by side.
func (s *surveyor) each(fn func(m *memberReport)) {
	var running sync.WaitGroup
	slots := make(chan struct{}, healthProbes)
	for _, m := range s.members {
		running.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			fn(m)
		})
	}
	running.Wait()
}

func (s *surveyor) readOwnCertificate() {
	if s.t.global.cert == "" {
		return
	}
	data, err := os.ReadFile(s.t.global.cert)
	if err != nil {
		return // the client could not be made either
	}
	if block, _ := pem.Decode(data); block != nil {
		s.ownCertificate, _ = x509.ParseCertificate(block.Bytes)
	}
}

// dial makes a client of one endpoint.
func (s *surveyor) dial(endpoint string) (*clientv3.Client, error) {
	cfg := s.cfg
	cfg.Endpoints = []string{endpoint}
	return clientv3.New(cfg)
}

// meet finds out which members there are and how each is reached: by an endpoint that was given, if it is one of them, else by
// its client URLs.
func (s *surveyor) meet(ctx context.Context, usable []string) {
	byID := map[uint64]*memberReport{}
	for _, endpoint := range usable {
		client, err := s.dial(endpoint)
		if err != nil {
			s.loginErr = err
			continue
		}
		m := &memberReport{endpoint: endpoint, client: client, reach: s.reachOf(endpoint)}
		s.askStatus(ctx, m)
		if m.status != nil {
			m.id = m.status.Header.GetMemberId()
		}
		if m.id != 0 && byID[m.id] != nil { // one member by two endpoints
			closeClient(client)
			continue
		}
		if m.id != 0 {
			byID[m.id] = m
		}
		s.members = append(s.members, m)
	}
	var list *clientv3.MemberListResponse
	for _, m := range s.members {
		call, cancel := context.WithTimeout(ctx, s.t.global.commandTimeout)
		var err error
		// The list as this one member knows it: there need be no quorum.
		list, err = m.client.MemberList(call, clientv3.WithSerializable())
		cancel()
		if err == nil {
			break
		}
		if errors.Is(err, rpctypes.ErrUserEmpty) || errors.Is(err, rpctypes.ErrPermissionDenied) {
			s.loginErr = err
		}
	}
	if list == nil {
		s.skip("members that --endpoints does not name: the list of members could not be had")
		return
	}
	for _, member := range list.Members {
		m := byID[member.ID]
		if m == nil {
			m = &memberReport{id: member.ID}
			s.members = append(s.members, m)
		}
		m.member, m.name = member, member.Name
		if m.client == nil && len(member.ClientURLs) > 0 {
			s.reachMember(ctx, m)
		}
	}
	slices.SortStableFunc(s.members, func(a, b *memberReport) int { return cmp.Compare(a.name, b.name) })
}

func (s *surveyor) reachOf(endpoint string) *reach {
	for _, r := range s.reached {
		if r.endpoint == endpoint {
			return r
		}
	}
	return nil
}

// reachMember looks at a member's client URLs until one answers.
func (s *surveyor) reachMember(ctx context.Context, m *memberReport) {
	for _, u := range m.member.ClientURLs {
		m.endpoint, m.reach = u, s.p.look(ctx, u)
		if !m.reach.usable {
			continue
		}
		client, err := s.dial(u)
		if err == nil {
			m.client = client
			return
		}
		m.statusErr = err
	}
}

func (s *surveyor) askStatus(ctx context.Context, m *memberReport) {
	ctx, cancel := context.WithTimeout(ctx, s.t.global.commandTimeout)
	defer cancel()
	r, err := pb.NewMaintenanceClient(m.client.ActiveConnection()).Status(ctx, &pb.StatusRequest{})
	m.status, m.statusErr = r, err
}

// examine asks one member.
func (s *surveyor) examine(ctx context.Context, m *memberReport) {
	if m.client == nil {
		return
	}
	s.askStatus(ctx, m)
	if id := m.status.GetHeader().GetMemberId(); m.id != 0 && id != 0 && id != m.id {
		closeClient(m.client)
		m.stranger, m.client, m.status = id, nil, nil
		return
	}
	if m.reach != nil {
		m.engram = m.reach.versions.Engram != ""
		m.metrics, m.metricsErr = s.p.memberMetrics(ctx, m, s.places)
	}
	call, cancel := context.WithTimeout(ctx, s.t.global.commandTimeout)
	defer cancel()
	inspect := inspectpb.NewInspectClient(m.client.ActiveConnection())
	s.readClock(call, m, inspect)
	if m.engram {
		m.top, _ = inspect.Top(call, &inspectpb.TopRequest{Depth: 3, Limit: manyRows})
	}
}

// readClock asks for the time: an Engram tells it to the nanosecond, anything else by the Date of an answer, which has seconds.
func (s *surveyor) readClock(ctx context.Context, m *memberReport, inspect inspectpb.InspectClient) {
	if m.reach != nil && !m.reach.date.date.IsZero() {
		d := m.reach.date
		took := d.to.Sub(d.from)
		m.clock = &clockReading{d.date.Add(time.Second / 2).Sub(d.from.Add(took / 2)), time.Second/2 + took/2}
	}
	for range clockAsks {
		from := s.p.now()
		r, err := inspect.Clock(ctx, &inspectpb.ClockRequest{})
		if err != nil {
			return
		}
		m.engram = true
		took := s.p.now().Sub(from)
		if m.clock == nil || took/2 < m.clock.precision {
			m.clock = &clockReading{time.Unix(0, r.UnixNanos).Sub(from.Add(took / 2)), took / 2}
		}
	}
}

// anyone is a member that answers, an Engram if there is one.
func (s *survey) anyone() *memberReport {
	var any *memberReport
	for _, m := range s.members {
		if m.client != nil && m.status != nil && !m.status.IsLearner && (any == nil || m.engram && !any.engram) {
			any = m
		}
	}
	return any
}

var errNoVoter = errors.New("no voter answers")

// askCluster asks what all members would answer alike.
func (s *surveyor) askCluster(ctx context.Context) {
	m := s.anyone()
	if m == nil {
		s.quorumErr = errNoVoter
		return
	}
	call := func(f func(ctx context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, s.t.global.commandTimeout)
		defer cancel()
		return f(ctx)
	}
	s.quorumErr = call(func(ctx context.Context) error {
		r, err := m.client.Get(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithCountOnly())
		if errors.Is(err, rpctypes.ErrPermissionDenied) { // a quorum was asked before
			s.skip("counts and sizes of keys: the user may not read all keys")
			return nil
		}
		if err == nil {
			s.keys = r.Count
		}
		return err
	})
	if s.quorumErr != nil {
		s.skip("keys, leases, alarms and authentication: %v", s.quorumErr)
		return
	}
	tell := func(what string, err error) {
		if err != nil {
			s.skip("%s: %v", what, err)
		}
	}
	tell("alarms", call(func(ctx context.Context) error {
		r, err := m.client.AlarmList(ctx)
		if err == nil {
			s.alarms = r.Alarms
		}
		return err
	}))
	tell("leases", call(func(ctx context.Context) error {
		r, err := m.client.Leases(ctx)
		if err == nil {
			s.leases = len(r.Leases)
		}
		return err
	}))
	tell("authentication", call(func(ctx context.Context) error {
		r, err := m.client.AuthStatus(ctx)
		if err == nil {
			s.authOn = &r.Enabled
		}
		return err
	}))
	if !m.engram {
		s.skip("large values, crowded and busy prefixes: etcd tells a size only with the value itself, so that all would have to be read, and does not count by prefix; Engram tells them")
		return
	}
	inspect := inspectpb.NewInspectClient(m.client.ActiveConnection())
	tell("sizes of keys", call(func(ctx context.Context) error {
		r, err := inspect.Usage(ctx, &inspectpb.UsageRequest{Order: inspectpb.UsageRequest_LIVE, Limit: manyRows})
		if err == nil {
			s.largest, s.total = r.Rows, r.Total
		}
		return err
	}))
	tell("crowded prefixes", call(func(ctx context.Context) error {
		r, err := inspect.Usage(ctx, &inspectpb.UsageRequest{Delimiter: []byte("/"), Depth: 2, Order: inspectpb.UsageRequest_KEYS, Limit: manyRows})
		if err == nil {
			s.crowded = r.Rows
		}
		return err
	}))
}

// compareHashes has all members hash their history up to the same revision.
func (s *surveyor) compareHashes(ctx context.Context) {
	revision, size, answering := int64(0), int64(0), 0
	for _, m := range s.members {
		if m.status == nil {
			continue
		}
		answering++
		size = max(size, m.status.DbSizeInUse)
		if r := m.status.Header.GetRevision(); revision == 0 || r < revision {
			revision = r
		}
	}
	switch {
	case answering < 2:
		return
	case size > hashBytes && !s.deep:
		s.skip("hashes: the store has %s, so that they take their time; --deep compares them", bytesText(size))
		return
	}
	var mu sync.Mutex
	s.each(func(m *memberReport) {
		if m.status == nil || m.client == nil {
			return
		}
		wait := s.t.global.commandTimeout
		if s.deep {
			wait = max(wait, 10*time.Minute)
		}
		ctx, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		r, err := pb.NewMaintenanceClient(m.client.ActiveConnection()).HashKV(ctx, &pb.HashKVRequest{Revision: revision})
		if err == nil {
			m.hash = r
			return
		}
		mu.Lock()
		defer mu.Unlock()
		s.skip("the hash of %v: %v", m, rpctypes.Error(err))
	})
}

func (s *survey) close() {
	for _, m := range s.members {
		if m.client != nil {
			closeClient(m.client)
		}
	}
}
