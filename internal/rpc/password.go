package rpc

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"sync/atomic"

	"golang.org/x/crypto/bcrypt"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/processors"
)

// maxHashing is how many calls may wait to hash or compare a password.
const maxHashing = 256

// maxPassword is how many bytes of a password bcrypt takes.
const maxPassword = 72

// hasher hashes and compares passwords, which is slow by design: on at most half
// of the CPUs, so that who guesses passwords does not starve the others.
type hasher struct {
	cost    int
	places  chan struct{} // one taken by each that works
	waiting atomic.Int64
}

func newHasher(cost int) *hasher {
	return &hasher{cost: cost, places: make(chan struct{}, max(1, processors.CPUs()/2))}
}

// enter waits for a place. Leave gives it back.
func (h *hasher) enter(ctx context.Context) error {
	if h.waiting.Add(1) > maxHashing {
		h.waiting.Add(-1)
		return errTooManyRequests
	}
	defer h.waiting.Add(-1)
	select {
	case h.places <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (h *hasher) leave() { <-h.places }

// hash returns what the log carries in place of a password.
func (h *hasher) hash(ctx context.Context, password string) (string, error) {
	if err := h.enter(ctx); err != nil {
		return "", err
	}
	defer h.leave()
	hash, err := bcrypt.GenerateFromPassword([]byte(password), h.cost)
	if err != nil {
		return "", err
	}
	return base64.StdEncoding.EncodeToString(hash), nil
}

// compare fails with auth.ErrFailed unless the hash is of the password. What
// else may be wrong with the hash tells a caller nothing.
func (h *hasher) compare(ctx context.Context, hash []byte, password string) error {
	if err := h.enter(ctx); err != nil {
		return err
	}
	defer h.leave()
	if err := bcrypt.CompareHashAndPassword(hash, []byte(password)); err != nil {
		return errors.Join(auth.ErrFailed, err)
	}
	return nil
}

// tokenLetters are how many letters a simple token begins with.
const tokenLetters = 16

// newTokenPrefix returns random letters for a simple token to begin with.
func newTokenPrefix() string {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	prefix := make([]byte, 0, tokenLetters)
	for len(prefix) < tokenLetters {
		var random [2 * tokenLetters]byte
		_, _ = rand.Read(random[:]) // it never fails
		for _, b := range random {
			// A byte beyond the last multiple would favour the first letters.
			if int(b) < 256/len(letters)*len(letters) && len(prefix) < tokenLetters {
				prefix = append(prefix, letters[int(b)%len(letters)])
			}
		}
	}
	return string(prefix)
}
