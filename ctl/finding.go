package ctl

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// severity is how bad a finding is. It is also doctor's exit code for the worst of them, but for notes, which end with 0.
type severity int

const (
	note        severity = iota // for information
	warning                     // it works, but something should be done
	failure                     // something is broken or soon will be
	unreachable                 // nothing can be learned, for no member was reached
)

var severityNames = [...]string{note: "note", warning: "warning", failure: "error", unreachable: "unreachable"}

func (s severity) String() string { return severityNames[s] }

// MarshalJSON implements json.Marshaler.
func (s severity) MarshalJSON() ([]byte, error) { return json.Marshal(s.String()) }

// finding is something that an operator should know. Where is an endpoint or member, empty for the cluster; Cause and Cure may be
// empty for notes.
type finding struct {
	Severity severity `json:"severity"`
	Check    string   `json:"check"` // a word for scripts
	Where    string   `json:"where,omitempty"`
	What     string   `json:"what"`
	Cause    string   `json:"cause,omitempty"`
	Cure     string   `json:"cure,omitempty"`
}

// sortFindings puts the worst first, and leaves the order of the checks otherwise.
func sortFindings(findings []finding) {
	slices.SortStableFunc(findings, func(a, b finding) int { return cmp.Compare(b.Severity, a.Severity) })
}

// worst is the highest severity, note if there is none.
func worst(findings []finding) severity {
	w := note
	for _, f := range findings {
		w = max(w, f.Severity)
	}
	return w
}

// text is the finding for people, three lines at most.
func (f *finding) text() string {
	var b strings.Builder
	label := map[severity]string{note: "NOTE", warning: "WARNING", failure: "ERROR", unreachable: "UNREACHABLE"}[f.Severity]
	fmt.Fprintf(&b, "%-8s ", label)
	if !strings.Contains(f.What, f.Where) {
		b.WriteString(f.Where + ": ")
	}
	b.WriteString(f.What + "\n")
	if f.Cause != "" {
		b.WriteString("  cause: " + f.Cause + "\n")
	}
	if f.Cure != "" {
		b.WriteString("  cure:  " + f.Cure + "\n")
	}
	return b.String()
}
