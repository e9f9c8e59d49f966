// Package spread tells how far the samples of a figure lie apart.
package spread

import (
	"fmt"
	"slices"
)

// Spread is a figure over the rounds of a run.
type Spread struct {
	Min, Median, Max float64
	Samples          []float64 // in the order in which they were taken
}

// Of returns nil if there are no samples.
func Of(samples []float64) *Spread {
	if len(samples) == 0 {
		return nil
	}
	sorted := slices.Sorted(slices.Values(samples))
	n := len(sorted)
	return &Spread{Min: sorted[0], Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, Max: sorted[n-1], Samples: samples}
}

func (s *Spread) String() string {
	if s == nil {
		return "-"
	}
	return Number(s.Min) + " " + Number(s.Median) + " " + Number(s.Max)
}

// Number prints three or more significant digits.
func Number(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.3g", v)
	}
}
