package etcddir

import "fmt"

// DamageError says that a file of the log is not what etcd wrote. It matches
// ErrDamaged.
type DamageError struct {
	File   string
	Offset int64
	Why    string
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("etcddir: %s is damaged at offset %d: %s; put back an undamaged copy of the file, "+
		"or remove this member from its cluster and add a new one, or restore a backup", e.File, e.Offset, e.Why)
}

// Unwrap makes errors.Is(err, ErrDamaged) true.
func (e *DamageError) Unwrap() error { return ErrDamaged }
