package storage

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2"
)

// DamageError says that a file of the store is not what was written. It matches
// ErrDamaged.
type DamageError struct {
	File string
	// Offset and Length are of the block in File, if the damage is in one;
	// otherwise Length is 0.
	Offset, Length int64
	Held           string // what the file holds, as far as it can be told
	Why            string
}

func (e *DamageError) Error() string {
	where := ""
	if e.Length > 0 {
		where = fmt.Sprintf(" at offset %d (a block of %d bytes)", e.Offset, e.Length)
	}
	return fmt.Sprintf("storage: %s is damaged%s, which holds %s: %s; %s", e.File, where, e.Held, e.Why, damageCure)
}

// damageCure is what to do about damage.
const damageCure = "rebuild this member from its peers with `engram ctl rebuild`, or restore a backup if it has none"

// Unwrap makes errors.Is(err, ErrDamaged) true.
func (e *DamageError) Unwrap() error { return ErrDamaged }

// blockText is how Pebble names a block that does not fit its checksum.
var blockText = regexp.MustCompile(`block (\d+)/(\d+)`)

// tableDamage is what Pebble tells of a table.
func tableDamage(i pebble.DataCorruptionInfo) *DamageError {
	e := &DamageError{File: i.Path, Held: heldBetween(i.Bounds.Start, i.Bounds.End.Key), Why: fmt.Sprint(i.Details)}
	if m := blockText.FindStringSubmatch(e.Why); m != nil {
		e.Offset, _ = strconv.ParseInt(m[1], 10, 64)
		e.Length, _ = strconv.ParseInt(m[2], 10, 64)
	}
	return e
}

// openError is why a store cannot be opened. What Pebble does not find, or cannot
// read, is in the file that lists all others, or in that of its options.
func openError(fs FS, dir string, err error) error {
	if !pebble.IsCorruptionError(err) && !errors.Is(err, os.ErrNotExist) && !unreadable.MatchString(err.Error()) {
		return fmt.Errorf("storage: open %s: %w", dir, err)
	}
	names, _ := fs.List(dir)
	var found []string
	for _, name := range names {
		if strings.HasPrefix(name, manifestPrefix) || strings.HasPrefix(name, optionsPrefix) {
			found = append(found, name)
		}
	}
	slices.Sort(found)
	return &DamageError{File: fs.PathJoin(dir, strings.Join(found, " or ")), Held: "the list of the store's tables or how it was written, or a table is missing", Why: err.Error()}
}

const optionsPrefix = "OPTIONS-"

// unreadable are errors of Pebble about files that it does not call corruption.
var unreadable = regexp.MustCompile(`(?i)manifest|options|comparer|merger|version edit|invalid|L\d+ files|checksum|key=value`)

// heldBetween says what a table holds whose keys lie between two.
func heldBetween(first, last []byte) string {
	from, _, err := ParseRevisionKey(first)
	if err != nil {
		return "rows of the small tables (members, leases, users, alarms)"
	}
	to, _, err := ParseRevisionKey(last)
	if err != nil {
		to = from
	}
	return fmt.Sprintf("records of the revisions %d to %d", from, to)
}
