package raftlog

import "fmt"

// DamageError says that a segment no longer holds what was synced to it. It
// matches ErrDamaged.
type DamageError struct {
	File   string
	Offset int64  // in File, of the first record that is not as written
	Held   string // what stood there, as far as it can be told
	Why    string // how it is known that this is no interrupted write
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("raftlog: %s is damaged at offset %d, which held %s: %s; "+
		"put back an undamaged copy of the file, or rebuild this member from its peers with `engram ctl rebuild`",
		e.File, e.Offset, e.Held, e.Why)
}

// Unwrap makes errors.Is(err, ErrDamaged) true.
func (e *DamageError) Unwrap() error { return ErrDamaged }
