package auth

import (
	"errors"
	"testing"
)

func TestCheckCaller(t *testing.T) {
	on, off := &Root{enabled: true}, &Root{}
	if err := on.CheckCaller(""); !errors.Is(err, ErrUserEmpty) {
		t.Errorf("nobody: %v", err)
	}
	for _, err := range []error{on.CheckCaller("of no table"), off.CheckCaller("")} {
		if err != nil {
			t.Error(err)
		}
	}
}
