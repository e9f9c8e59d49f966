//go:build cgo && linux

package storage

/*
#include <malloc.h>

// The GNU C library has an arena of its own for each thread that allocates, and
// gives a freed block only to threads of the same arena. Pebble's blocks are
// allocated and freed by whatever thread runs at the moment, and take several
// times their budget so.
static void share_arena(void) {
#ifdef M_ARENA_MAX
	mallopt(M_ARENA_MAX, 1);
#endif
}
*/
import "C"

// Before any thread has an arena of its own.
func init() { C.share_arena() }
