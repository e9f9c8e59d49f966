package command

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"
)

// FeatureLevel is a feature level for the cluster to agree on, and the
// fingerprint of the membership it was found for.
//
// It travels in an entry that real members apply without effect, an Alarm GET,
// as a field of the header that they do not know. It is not in the AlarmRequest:
// a real member puts a client's request into the log with the fields that it
// does not know, whereas it makes the header itself. So no client can forge it.
type FeatureLevel struct {
	Level       uint64
	Fingerprint uint64
}

const (
	// fieldFeatureLevel is a field of RequestHeader, and far from etcd's.
	fieldFeatureLevel protowire.Number = 50051
	featureLevelSize                   = 8 + 8
)

// AppendFeatureLevel appends the entry that carries l. It fails as AppendRequest
// does.
func AppendFeatureLevel(dst []byte, h Header, l FeatureLevel) ([]byte, error) {
	if _, err := AppendRequest(nil, KindAlarm, h, nil); err != nil {
		return dst, err
	}
	header := appendHeaderFields(nil, h)
	header = protowire.AppendTag(header, fieldFeatureLevel, protowire.BytesType)
	header = append(header, featureLevelSize)
	header = binary.BigEndian.AppendUint64(header, l.Level)
	header = binary.BigEndian.AppendUint64(header, l.Fingerprint)
	dst = appendMessageField(dst, KindAlarm.Field(), nil) // empty: GET, of all alarms
	return appendMessageField(dst, fieldHeader, header), nil
}

// parseFeatureLevel finds the level among the unknown fields of a header. What is
// not exactly as AppendFeatureLevel writes it is nothing, on every member.
func parseFeatureLevel(unknown []byte) *FeatureLevel {
	field, typ, body, rest := nextField(unknown)
	if field != fieldFeatureLevel || typ != protowire.BytesType || len(body) != featureLevelSize || len(rest) != 0 {
		return nil
	}
	return &FeatureLevel{Level: binary.BigEndian.Uint64(body), Fingerprint: binary.BigEndian.Uint64(body[8:])}
}
