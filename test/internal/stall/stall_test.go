package stall

import (
	"errors"
	"os"
	"testing"
	"time"
)

// TestLate notes a beat that comes late, while it lasts and after it.
func TestLate(t *testing.T) {
	w, err := Begin()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	w.mu.Lock()           // the beat that is under way cannot end
	time.Sleep(3 * short) // it is a time that is noted
	w.mu.Unlock()
	if got := w.Longest(began); got < 2*short {
		t.Errorf("after a stall of %v the longest is %v", time.Since(began), got)
	}
	for _, s := range w.Since(began) {
		if s.End.Before(began) || s.Length() < short {
			t.Errorf("%+v is none since %v", s, began)
		}
	}
	if got := w.Since(time.Now().Add(time.Hour)); len(got) > 1 { // one may last
		t.Errorf("in an hour: %v", got)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(w.file.Name()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its file: %v", err)
	}
}

// TestBlind: a watch that cannot write says so, and excuses nobody.
func TestBlind(t *testing.T) {
	w, err := Begin()
	if err != nil {
		t.Fatal(err)
	}
	if err := w.file.Close(); err != nil {
		t.Fatal(err)
	}
	w.done.Wait() // it ends by itself
	if err := w.Close(); err == nil {
		t.Error("it wrote to a closed file")
	}
}
