package ctl

import (
	"bufio"
	"io"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/terminal"
)

// tablePrinter draws boxes, for the answers that are tables.
type tablePrinter struct {
	refuser
	out *bufio.Writer
}

func (p *tablePrinter) members(r *clientv3.MemberListResponse) error {
	var rows [][]string
	for _, m := range r.Members {
		rows = append(rows, memberRow(m))
	}
	p.table(memberHeader, rows)
	return nil
}

func (p *tablePrinter) health(all []endpointHealth, _ io.Writer) error {
	var rows [][]string
	for _, h := range all {
		rows = append(rows, []string{h.Endpoint, yesNo(h.Health), h.Took, h.Error})
	}
	p.table([]string{"Endpoint", "Health", "Took", "Error"}, rows)
	return nil
}

func (p *tablePrinter) statuses(all []endpointStatus) error {
	var rows [][]string
	for _, s := range all {
		rows = append(rows, statusRow(s))
	}
	p.table(statusHeader, rows)
	return nil
}

func (p *tablePrinter) hashes(all []endpointHashKV) error {
	var rows [][]string
	for _, h := range all {
		rows = append(rows, hashRow(h))
	}
	p.table(hashHeader, rows)
	return nil
}

func (p *tablePrinter) table(header []string, rows [][]string) { terminal.Table(p.out, header, rows) }
