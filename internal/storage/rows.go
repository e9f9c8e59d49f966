package storage

import (
	"context"
	"errors"
)

// Rows calls fn for each row of a small table in ascending order, until fn
// fails. Name and value are good during the call only.
func Rows(r Reader, t Table, fn func(name, value []byte) error) error {
	lower, upper := TableBounds(t)
	it, err := r.Iter(context.Background(), lower, upper)
	if err != nil {
		return err
	}
	for ok := it.First(); ok; ok = it.Next() {
		value, err := it.ValueAndErr()
		if err == nil {
			err = fn(RowOf(it.Key()), value)
		}
		if err != nil {
			return errors.Join(err, it.Close())
		}
	}
	return errors.Join(it.Error(), it.Close())
}
