// Package logging makes the slog handler whose lines have etcd's form: JSON with
// the keys level, ts, caller and msg, or a console form of the same.
//
// Scripts and test frameworks read such lines ("ready to serve client
// requests"), so the keys are part of the surface (surface.md, section 8).
package logging

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"gopkg.in/natefinch/lumberjack.v2"
)

// Options choose where lines go and what they look like.
type Options struct {
	// Level is debug, info, warn or error; etcd's dpanic, panic and fatal count
	// as error.
	Level string
	// Format is json or console.
	Format string
	// Outputs are default (stderr), stderr, stdout, or file paths.
	Outputs []string
	// Rotate turns rotation on; RotateJSON is its configuration as
	// --log-rotation-config-json has it.
	Rotate     bool
	RotateJSON string
}

// Open returns a logger and what must be closed after its last line.
func Open(o Options) (*slog.Logger, io.Closer, error) {
	var writers []io.Writer
	var files closers
	for _, out := range o.Outputs {
		switch out {
		case "default", "stderr":
			writers = append(writers, os.Stderr)
		case "stdout":
			writers = append(writers, os.Stdout)
		case "/dev/null":
		default:
			w, err := openFile(out, o)
			if err != nil {
				return nil, nil, fmt.Errorf("log output %s: %w", out, err)
			}
			files = append(files, w)
			writers = append(writers, w)
		}
	}
	return slog.New(NewHandler(io.MultiWriter(writers...), o.Format, o.Level)), files, nil
}

func openFile(path string, o Options) (io.WriteCloser, error) {
	if !o.Rotate {
		return os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	}
	var r struct {
		MaxSize, MaxAge, MaxBackups int
		LocalTime, Compress         bool
	}
	if err := json.Unmarshal([]byte(o.RotateJSON), &r); err != nil {
		return nil, fmt.Errorf("--log-rotation-config-json: %w", err)
	}
	return &lumberjack.Logger{Filename: path, MaxSize: r.MaxSize, MaxAge: r.MaxAge, MaxBackups: r.MaxBackups, LocalTime: r.LocalTime, Compress: r.Compress}, nil
}

type closers []io.Closer

func (cs closers) Close() (err error) {
	for _, c := range cs {
		if e := c.Close(); e != nil && err == nil {
			err = e
		}
	}
	return err
}

// timeForm is that of etcd's lines.
const timeForm = "2006-01-02T15:04:05.000000Z0700"

// NewHandler returns a handler that writes to w.
func NewHandler(w io.Writer, format, level string) slog.Handler {
	ho := &slog.HandlerOptions{AddSource: true, Level: levelOf(level), ReplaceAttr: replace}
	if format == "console" {
		return slog.NewTextHandler(w, ho)
	}
	return slog.NewJSONHandler(w, ho)
}

func levelOf(name string) slog.Level {
	switch name {
	case "debug":
		return slog.LevelDebug
	case "info", "":
		return slog.LevelInfo
	case "warn":
		return slog.LevelWarn
	}
	return slog.LevelError
}

// replace renames slog's own attributes to etcd's.
func replace(groups []string, a slog.Attr) slog.Attr {
	if len(groups) > 0 {
		return a
	}
	switch a.Key {
	case slog.TimeKey:
		return slog.String("ts", a.Value.Time().Format(timeForm))
	case slog.LevelKey:
		return slog.String("level", strings.ToLower(a.Value.String()))
	case slog.SourceKey:
		if src, ok := a.Value.Any().(*slog.Source); ok {
			dir, file := filepath.Split(src.File)
			return slog.String("caller", filepath.Base(dir)+"/"+file+":"+strconv.Itoa(src.Line))
		}
	}
	switch v := a.Value.Any().(type) {
	case time.Duration:
		return slog.String(a.Key, v.String())
	case error:
		return slog.String(a.Key, v.Error())
	}
	return a
}
