package command

import "unicode/utf8"

// Header goes before every command. The member that proposes fills it.
type Header struct {
	// ID is the identity by which the proposer knows its command again.
	ID uint64
	// Username is who asks, empty if auth is off or the server itself asks.
	Username string
	// AuthRevision is the auth revision that the caller's token was good at.
	AuthRevision uint64
}

// PutRequest is a decoded etcdserverpb.PutRequest. Slices alias the input.
type PutRequest struct {
	Key, Value                       []byte
	Lease                            int64
	PrevKV, IgnoreValue, IgnoreLease bool
}

// RangeRequest is a decoded etcdserverpb.RangeRequest. Slices alias the input.
// SortOrder and SortTarget are the numbers of etcd's enums, unknown ones too.
type RangeRequest struct {
	Key, RangeEnd                     []byte
	Limit, Revision                   int64
	SortOrder, SortTarget             int32
	Serializable, KeysOnly, CountOnly bool
	MinMod, MaxMod                    int64
	MinCreate, MaxCreate              int64
}

// DeleteRangeRequest is a decoded etcdserverpb.DeleteRangeRequest. Slices alias
// the input.
type DeleteRangeRequest struct {
	Key, RangeEnd []byte
	PrevKV        bool
}

// CompactionRequest is a decoded etcdserverpb.CompactionRequest.
type CompactionRequest struct {
	Revision int64
	Physical bool
}

// Each Parse function decodes the wire form of one message and says whether it
// is canonical: what the generated type would write, byte for byte. So an accepted message may stand in the log as it is. One that is not
// accepted leaves *r unspecified; Normalize tells whether it is valid at all.

// ParsePut decodes a canonical PutRequest.
func ParsePut(raw []byte, r *PutRequest) (canonical bool) {
	*r = PutRequest{}
	var last byte
	for ok := true; len(raw) > 0; {
		tag := raw[0]
		if tag <= last { // out of order, or twice
			return false
		}
		last, raw = tag, raw[1:]
		switch tag {
		case 1<<3 | 2:
			r.Key, raw, ok = bytesField(raw)
		case 2<<3 | 2:
			r.Value, raw, ok = bytesField(raw)
		case 3 << 3:
			r.Lease, raw, ok = intField(raw)
		case 4 << 3:
			raw, ok = boolField(raw)
			r.PrevKV = ok
		case 5 << 3:
			raw, ok = boolField(raw)
			r.IgnoreValue = ok
		case 6 << 3:
			raw, ok = boolField(raw)
			r.IgnoreLease = ok
		default:
			return false
		}
		if !ok {
			return false
		}
	}
	return true
}

// ParseRange decodes a canonical RangeRequest.
func ParseRange(raw []byte, r *RangeRequest) (canonical bool) {
	*r = RangeRequest{}
	var last byte
	for ok := true; len(raw) > 0; {
		tag := raw[0]
		if tag <= last {
			return false
		}
		last, raw = tag, raw[1:]
		switch tag {
		case 1<<3 | 2:
			r.Key, raw, ok = bytesField(raw)
		case 2<<3 | 2:
			r.RangeEnd, raw, ok = bytesField(raw)
		case 3 << 3:
			r.Limit, raw, ok = intField(raw)
		case 4 << 3:
			r.Revision, raw, ok = intField(raw)
		case 5 << 3:
			r.SortOrder, raw, ok = enumField(raw)
		case 6 << 3:
			r.SortTarget, raw, ok = enumField(raw)
		case 7 << 3:
			raw, ok = boolField(raw)
			r.Serializable = ok
		case 8 << 3:
			raw, ok = boolField(raw)
			r.KeysOnly = ok
		case 9 << 3:
			raw, ok = boolField(raw)
			r.CountOnly = ok
		case 10 << 3:
			r.MinMod, raw, ok = intField(raw)
		case 11 << 3:
			r.MaxMod, raw, ok = intField(raw)
		case 12 << 3:
			r.MinCreate, raw, ok = intField(raw)
		case 13 << 3:
			r.MaxCreate, raw, ok = intField(raw)
		default:
			return false
		}
		if !ok {
			return false
		}
	}
	return true
}

// ParseDeleteRange decodes a canonical DeleteRangeRequest.
func ParseDeleteRange(raw []byte, r *DeleteRangeRequest) (canonical bool) {
	*r = DeleteRangeRequest{}
	var last byte
	for ok := true; len(raw) > 0; {
		tag := raw[0]
		if tag <= last {
			return false
		}
		last, raw = tag, raw[1:]
		switch tag {
		case 1<<3 | 2:
			r.Key, raw, ok = bytesField(raw)
		case 2<<3 | 2:
			r.RangeEnd, raw, ok = bytesField(raw)
		case 3 << 3:
			raw, ok = boolField(raw)
			r.PrevKV = ok
		default:
			return false
		}
		if !ok {
			return false
		}
	}
	return true
}

// ParseCompaction decodes a canonical CompactionRequest.
func ParseCompaction(raw []byte, r *CompactionRequest) (canonical bool) {
	*r = CompactionRequest{}
	var last byte
	for ok := true; len(raw) > 0; {
		tag := raw[0]
		if tag <= last {
			return false
		}
		last, raw = tag, raw[1:]
		switch tag {
		case 1 << 3:
			r.Revision, raw, ok = intField(raw)
		case 2 << 3:
			raw, ok = boolField(raw)
			r.Physical = ok
		default:
			return false
		}
		if !ok {
			return false
		}
	}
	return true
}

// ParseHeader decodes a canonical RequestHeader. The name is a copy, unless
// h.Username held the same name before: then that string is kept, so that a
// header used again costs no allocation.
func ParseHeader(raw []byte, h *Header) (canonical bool) {
	name := h.Username
	*h = Header{}
	var last byte
	for ok := true; len(raw) > 0; {
		tag := raw[0]
		if tag <= last {
			return false
		}
		last, raw = tag, raw[1:]
		switch tag {
		case 1 << 3:
			h.ID, raw, ok = uintField(raw)
		case 2<<3 | 2:
			var b []byte
			b, raw, ok = bytesField(raw)
			if ok = ok && utf8.Valid(b); ok {
				if string(b) != name {
					name = string(b)
				}
				h.Username = name
			}
		case 3 << 3:
			h.AuthRevision, raw, ok = uintField(raw)
		default:
			return false
		}
		if !ok {
			return false
		}
	}
	return true
}
