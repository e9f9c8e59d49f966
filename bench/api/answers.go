package api

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

// number is one integer field of a message; 0 if the message is broken, which its callers take for missing.
func number(b []byte, field protowire.Number) (v int64) {
	_ = fields(b, func(n protowire.Number, _ []byte, i int64) {
		if n == field {
			v = i
		}
	})
	return v
}

const headerRevision = 3

// Revision is the revision in the header of an answer.
func Revision(answer []byte) (rev int64, err error) {
	err = fields(answer, func(n protowire.Number, header []byte, _ int64) {
		if n == 1 && header != nil {
			rev = number(header, headerRevision)
		}
	})
	if err == nil && rev == 0 {
		err = fmt.Errorf("answer of %d bytes has no revision", len(answer))
	}
	return rev, err
}

// Kvs is what a Range answered, as far as a single get needs.
type Kvs struct {
	Keys        int
	Count       int64
	Value       []byte // of the last key; aliases the answer
	ModRevision int64  // of the last key
}

// KvsOf reads a RangeResponse.
func KvsOf(answer []byte) (k Kvs, err error) {
	var last []byte
	err = fields(answer, func(n protowire.Number, v []byte, i int64) {
		switch n {
		case 2:
			k.Keys++
			last = v
		case 4:
			k.Count = i
		}
	})
	if err == nil && last != nil {
		err = fields(last, func(n protowire.Number, v []byte, i int64) {
			switch n {
			case 3:
				k.ModRevision = i
			case 5:
				k.Value = v
			}
		})
	}
	return k, err
}

// Txned is what a transaction of AppendUpdate or AppendDelete answered.
type Txned struct {
	Succeeded bool
	Revision  int64 // of the header
	Found     bool  // it did not succeed, and there is such a key
	Changed   int64 // when that was last changed
}

// TxnOf reads a TxnResponse.
func TxnOf(answer []byte) (t Txned, err error) {
	err = fields(answer, func(n protowire.Number, v []byte, i int64) {
		switch n {
		case 1:
			t.Revision = number(v, headerRevision)
		case 2:
			t.Succeeded = i != 0
		case 3:
			_ = fields(v, func(n protowire.Number, v []byte, _ int64) { // a broken answer is found below, by what it lacks
				if n != 1 { // ResponseOp.response_range
					return
				}
				_ = fields(v, func(n protowire.Number, kv []byte, _ int64) {
					if n == 2 {
						t.Found, t.Changed = true, number(kv, 3)
					}
				})
			})
		}
	})
	if err == nil && t.Revision == 0 {
		err = fmt.Errorf("answer of %d bytes has no revision", len(answer))
	}
	return t, err
}

// Deleted is how many keys a DeleteRangeResponse says were deleted.
func Deleted(answer []byte) int64 { return number(answer, 2) }

// Events is a WatchResponse beside its events.
type Events struct {
	Watcher           int64
	Created, Canceled bool
	Compacted         int64 // compact revision, if that is why it was cancelled
	Reason            []byte
	Count             int
}

// Event is one of them. Key and Value alias the answer.
type Event struct {
	Key, Value  []byte
	ModRevision int64
	Deleted     bool
}

// EventsOf reads a WatchResponse and calls each, if not nil, with its events in order.
func EventsOf(answer []byte, each func(watcher int64, e *Event)) (w Events, err error) {
	var event Event
	var broken error
	err = fields(answer, func(n protowire.Number, v []byte, i int64) {
		switch n {
		case 2:
			w.Watcher = i
		case 3:
			w.Created = i != 0
		case 4:
			w.Canceled = i != 0
		case 5:
			w.Compacted = i
		case 6:
			w.Reason = v
		case 11:
			w.Count++
			if each == nil || broken != nil {
				return
			}
			if broken = event.read(v); broken == nil {
				each(w.Watcher, &event)
			}
		}
	})
	if err == nil {
		err = broken
	}
	return w, err
}

func (e *Event) read(b []byte) error {
	*e = Event{}
	var kv []byte
	if err := fields(b, func(n protowire.Number, v []byte, i int64) {
		switch n {
		case 1:
			e.Deleted = i != 0
		case 2:
			kv = v
		}
	}); err != nil {
		return err
	}
	return fields(kv, func(n protowire.Number, v []byte, i int64) {
		switch n {
		case 1:
			e.Key = v
		case 3:
			e.ModRevision = i
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

// Granted is the lease of a LeaseGrantResponse.
func Granted(answer []byte) int64 { return number(answer, 2) }

// TokenOf is the token of an AuthenticateResponse.
func TokenOf(answer []byte) (token string, err error) {
	err = fields(answer, func(n protowire.Number, v []byte, _ int64) {
		if n == 2 {
			token = string(v)
		}
	})
	return token, err
}

// VersionOf is the version in a StatusResponse.
func VersionOf(answer []byte) (version string, err error) {
	err = fields(answer, func(n protowire.Number, v []byte, _ int64) {
		if n == 2 {
			version = string(v)
		}
	})
	return version, err
}

// EachKv calls each with every key of a RangeResponse, in order. The key aliases the answer.
func EachKv(answer []byte, each func(key []byte, modRevision int64)) error {
	var broken error
	err := fields(answer, func(n protowire.Number, kv []byte, _ int64) {
		if n != 2 || broken != nil {
			return
		}
		var key []byte
		var rev int64
		broken = fields(kv, func(n protowire.Number, v []byte, i int64) {
			switch n {
			case 1:
				key = v
			case 3:
				rev = i
			}
		})
		each(key, rev)
	})
	if err == nil {
		err = broken
	}
	return err
}
