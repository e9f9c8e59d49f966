package util

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/engram-kv/engram/internal/terminal"
)

// answer is what a command found, in all output formats.
type answer struct {
	simple string
	json   any
	// Of a table with one row. The names of fields are those of the columns unless
	// fields says otherwise.
	columns, row []string
	fields       []field
}

// field is a line of the format fields. A value is printed as it is.
type field struct {
	name  string
	value any
}

// print writes an answer in the format of --write-out.
func (t *tool) print(a answer) error {
	switch t.writeOut {
	case "simple":
		_, _ = fmt.Fprintln(t.out, a.simple) // an error stays in the writer until the flush at the end
	case "json":
		b, err := json.Marshal(a.json)
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintf(t.out, "%s\n", b)
	case "table":
		terminal.Table(t.out, a.columns, [][]string{a.row})
	case "fields":
		for _, f := range a.fields {
			_, _ = fmt.Fprintf(t.out, "%q : %v\n", f.name, f.value)
		}
	case "protobuf":
		return exit(exitFormat, errors.New("protobuf not supported as output format"))
	default:
		return exit(exitFormat, errors.New("unsupported output format"))
	}
	return nil
}
