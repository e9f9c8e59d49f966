//go:build race

package snapfile

const raceEnabled = true
