package load

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// fields calls each with every field of an encoded message: its bytes if it is of that kind, else its number.
func fields(b []byte, each func(n protowire.Number, v []byte, i int64)) error {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		switch typ {
		case protowire.VarintType:
			v, n := protowire.ConsumeVarint(b)
			if n < 0 {
				return protowire.ParseError(n)
			}
			each(num, nil, int64(v))
			b = b[n:]
		case protowire.BytesType:
			v, n := protowire.ConsumeBytes(b)
			if n < 0 {
				return protowire.ParseError(n)
			}
			each(num, v, 0)
			b = b[n:]
		default:
			return fmt.Errorf("field %d has wire type %d, which no answer uses", num, typ)
		}
	}
	return nil
}

// Revision is the revision in the header of an answer.
func Revision(answer []byte) (rev int64, err error) {
	err = fields(answer, func(n protowire.Number, header []byte, _ int64) {
		if n == 1 && header != nil {
			fields(header, func(n protowire.Number, _ []byte, i int64) { // a broken header leaves 0, which is an error below
				if n == 3 {
					rev = i
				}
			})
		}
	})
	if err == nil && rev == 0 {
		err = fmt.Errorf("answer of %d bytes has no revision", len(answer))
	}
	return rev, err
}

// Page is what a list answered.
type Page struct {
	Keys int
	Last []byte // last key; aliases the answer
	More bool
}

// PageOf reads a RangeResponse as far as paging needs.
func PageOf(answer []byte) (Page, error) {
	var p Page
	var last []byte
	err := fields(answer, func(n protowire.Number, v []byte, i int64) {
		switch n {
		case 2:
			p.Keys++
			last = v
		case 3:
			p.More = i != 0
		}
	})
	if err == nil && last != nil {
		err = fields(last, func(n protowire.Number, v []byte, _ int64) {
			if n == 1 {
				p.Last = v
			}
		})
	}
	return p, err
}

// Succeeded tells if a TxnResponse took the success branch.
func Succeeded(answer []byte) (ok bool, err error) {
	err = fields(answer, func(n protowire.Number, _ []byte, i int64) {
		if n == 2 {
			ok = i != 0
		}
	})
	return ok, err
}

// Events reads a WatchResponse: how many events it holds, the value of the last (which aliases it), whether it
// acknowledges a new watcher, and whether it ends one.
type Events struct {
	Count             int
	Key, Value        []byte // of the last event
	Watcher           int64
	Created, Canceled bool
}

// EventsOf reads a WatchResponse.
func EventsOf(answer []byte) (Events, error) {
	var e Events
	var last []byte
	err := fields(answer, func(n protowire.Number, v []byte, i int64) {
		switch n {
		case 2:
			e.Watcher = i
		case 3:
			e.Created = i != 0
		case 4:
			e.Canceled = i != 0
		case 11:
			e.Count++
			last = v
		}
	})
	if err != nil || last == nil {
		return e, err
	}
	var kv []byte
	if err := fields(last, func(n protowire.Number, v []byte, _ int64) {
		if n == 2 {
			kv = v
		}
	}); err != nil {
		return e, err
	}
	return e, fields(kv, func(n protowire.Number, v []byte, _ int64) {
		switch n {
		case 1:
			e.Key = v
		case 5:
			e.Value = v
		}
	})
}

// Renewed reads a LeaseKeepAliveResponse.
func Renewed(answer []byte) (id, ttl int64, err error) {
	err = fields(answer, func(n protowire.Number, _ []byte, i int64) {
		switch n {
		case 2:
			id = i
		case 3:
			ttl = i
		}
	})
	return id, ttl, err
}
