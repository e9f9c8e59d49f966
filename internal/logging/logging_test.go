package logging

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestLinesHaveEtcdsKeys(t *testing.T) {
	var b bytes.Buffer
	log := slog.New(NewHandler(&b, "json", "info"))
	log.Debug("hidden")
	log.Info("ready to serve client requests", "took", 5*time.Millisecond, "error", errors.New("x"))
	var line map[string]any
	if err := json.Unmarshal(b.Bytes(), &line); err != nil {
		t.Fatalf("%v in %q", err, b.String())
	}
	if line["level"] != "info" || line["msg"] != "ready to serve client requests" || line["took"] != "5ms" || line["error"] != "x" {
		t.Fatalf("line %v", line)
	}
	if c, _ := line["caller"].(string); !strings.HasPrefix(c, "logging/logging_test.go:") {
		t.Fatalf("caller %q", c)
	}
	if _, err := time.Parse(timeForm, line["ts"].(string)); err != nil {
		t.Fatal(err)
	}
}

func TestOutputs(t *testing.T) {
	for _, rotate := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "log")
		log, closer, err := Open(Options{Level: "warn", Format: "console", Outputs: []string{path}, Rotate: rotate, RotateJSON: `{"maxsize": 1}`})
		if err != nil {
			t.Fatal(err)
		}
		log.Info("no")
		log.Warn("disk slow", "member", 1)
		if err := closer.Close(); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(got), `msg="disk slow" member=1`) || strings.Contains(string(got), "msg=no") {
			t.Fatalf("rotate=%t: %q %v", rotate, got, err)
		}
	}
	if _, _, err := Open(Options{Outputs: []string{filepath.Join(t.TempDir(), "no", "dir")}}); err == nil {
		t.Fatal("opened a file in a missing directory")
	}
	if _, _, err := Open(Options{Outputs: []string{"x"}, Rotate: true, RotateJSON: "{"}); err == nil {
		t.Fatal("accepted broken rotation settings")
	}
}
