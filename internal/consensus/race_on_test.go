//go:build race

package consensus

// raceDetector says that tests run several times slower. The simulation has one goroutine, in which there are no races to find.
const raceDetector = true
