//go:build !race

package snapfile

const raceEnabled = false
