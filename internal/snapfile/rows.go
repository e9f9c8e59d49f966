package snapfile

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"github.com/coreos/go-semver/semver"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/member"
)

// Names in etcd's file.
const (
	bucketAlarm          = "alarm"
	bucketAuth           = "auth"
	bucketAuthRoles      = "authRoles"
	bucketAuthUsers      = "authUsers"
	bucketCluster        = "cluster"
	bucketKey            = "key"
	bucketLease          = "lease"
	bucketMembers        = "members"
	bucketMembersRemoved = "members_removed"
	bucketMeta           = "meta"

	metaConfState       = "confState"
	metaConsistentIndex = "consistent_index"
	metaStorageVersion  = "storageVersion"
	metaTerm            = "term"
)

// The checks below say whether a row is one that the table of it will open, and
// whether it is one at all. Rows go over as they are, byte for byte, since
// hashes are made of them.

func checkAlarm(key, _ []byte) (bool, error) {
	var m pb.AlarmMember
	if err := proto.Unmarshal(key, &m); err != nil {
		return false, damaged("no alarm: %w", err)
	}
	return true, nil
}

func checkAuth(key, value []byte) (bool, error) {
	switch string(key) {
	case "authEnabled":
		if len(value) != 1 {
			return false, damaged("value of %d bytes, want 1", len(value))
		}
		return true, nil
	case "authRevision":
		_, err := be64(value)
		return true, err
	}
	return false, nil
}

func checkRole(key, value []byte) (bool, error) {
	var r authpb.Role
	if err := proto.Unmarshal(value, &r); err != nil {
		return false, damaged("no role: %w", err)
	}
	if string(r.GetName()) != string(key) {
		return false, damaged("it holds role %.60q", r.GetName())
	}
	return true, nil
}

func checkUser(key, value []byte) (bool, error) {
	var u authpb.User
	if err := proto.Unmarshal(value, &u); err != nil {
		return false, damaged("no user: %w", err)
	}
	if string(u.GetName()) != string(key) {
		return false, damaged("it holds user %.60q", u.GetName())
	}
	return true, nil
}

func checkCluster(key, value []byte) (bool, error) {
	switch string(key) {
	case "clusterVersion":
		if _, err := semver.NewVersion(string(value)); err != nil {
			return false, damaged("%.60q is no version: %w", value, err)
		}
		return true, nil
	case "downgrade":
		if err := json.Unmarshal(value, new(member.Downgrade)); err != nil {
			return false, damaged("no downgrade: %w", err)
		}
		return true, nil
	}
	return false, nil
}

func checkLease(key, value []byte) (bool, error) {
	var id uint64
	err := fields(value, func(num protowire.Number, v uint64, b []byte) error {
		if num == 1 {
			id = v
		}
		return nil
	})
	if err != nil {
		return false, damaged("no lease: %w", err)
	}
	if len(key) != 8 || id == 0 || binary.BigEndian.Uint64(key) != id {
		return false, damaged("it holds lease %x", id)
	}
	return true, nil
}

func checkMember(key, value []byte) (bool, error) {
	var m member.Member
	if err := json.Unmarshal(value, &m); err != nil {
		return false, damaged("no member: %w", err)
	}
	if hex(m.ID) != string(key) {
		return false, damaged("it holds member %x", m.ID)
	}
	return true, nil
}

func checkRemoved(key, _ []byte) (bool, error) {
	var id uint64
	if _, err := fmt.Sscanf(string(key), "%x", &id); err != nil || hex(id) != string(key) {
		return false, damaged("no member ID in hexadecimal")
	}
	return true, nil
}

// checkKeyValue checks an encoded mvccpb.KeyValue of main revision main. It is
// as strict as mvcc, and refuses what no etcd writes.
func checkKeyValue(b []byte, main int64, tombstone bool) error {
	if len(b) > math.MaxInt32 {
		return fmt.Errorf("KeyValue of %d bytes", len(b))
	}
	if len(b) == 0 && !tombstone {
		return nil // a restore that raised the revision left it
	}
	var key []byte
	var create, mod, version uint64
	var others bool
	err := fields(b, func(num protowire.Number, v uint64, b []byte) error {
		switch num {
		case 1:
			key = b
			return nil
		case 2:
			create = v
		case 3:
			mod = v
		case 4:
			version = v
		}
		others = true
		return nil
	})
	switch {
	case err != nil:
		return fmt.Errorf("no KeyValue: %w", err)
	case len(key) == 0:
		return errors.New("KeyValue without a key")
	case tombstone && others:
		return errors.New("tombstone with more than a key")
	case tombstone:
		return nil
	case mod != uint64(main):
		return fmt.Errorf("KeyValue says mod revision %d", mod)
	case create == 0 || create > mod:
		return fmt.Errorf("KeyValue says create revision %d, mod revision %d", create, mod)
	case version == 0 || version > maxMain:
		return fmt.Errorf("KeyValue says version %d", version)
	}
	return nil
}

// fields gives the fields of a message that has numbers and bytes only: v is a
// number, b bytes. Those that we know must have the right one of the two types.
func fields(b []byte, fn func(num protowire.Number, v uint64, b []byte) error) error {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		var v uint64
		var bytes []byte
		switch typ {
		case protowire.VarintType:
			v, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			bytes, n = protowire.ConsumeBytes(b)
		default:
			return fmt.Errorf("field %d has wire type %d", num, typ)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if err := fn(num, v, bytes); err != nil {
			return err
		}
	}
	return nil
}
