// Package broken marks the errors of tests that say that a guarantee does not hold: that a write, an event, an answer, a hash or a
// permission is another than it must be, whatever the machine was busy with. test/again excuses no failure that says so.
package broken

import (
	"errors"
	"fmt"
)

// Mark begins the text of each such error.
const Mark = "BROKEN GUARANTEE:"

type guarantee struct{ error }

func (g guarantee) Error() string { return Mark + " " + g.error.Error() }
func (g guarantee) Unwrap() error { return g.error }

// Errorf is fmt.Errorf for them.
func Errorf(format string, args ...any) error { return guarantee{fmt.Errorf(format, args...)} }

// Is tells whether err, or one that it wraps, is of Errorf.
func Is(err error) bool { return errors.As(err, new(guarantee)) }
