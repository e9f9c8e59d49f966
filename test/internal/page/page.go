// Package page types commands of docs/operations.md: what operators are told is what is tested.
package page

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// Block is a fenced block of the page. One of commands has a line `<!-- test: name -->` before it.
type Block struct {
	Name string // "" without such a line
	Line int    // of the page
	Text string
}

var named = regexp.MustCompile(`^<!-- test: (\S+) -->$`)

// Read returns the blocks of a page.
func Read(path string) (blocks []Block, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var open *Block
	before := ""
	for i, line := range strings.Split(string(text), "\n") {
		fence := strings.HasPrefix(line, "```")
		switch {
		case fence && open == nil:
			open = &Block{Line: i + 1}
			if name := named.FindStringSubmatch(before); name != nil {
				open.Name = name[1]
			}
		case fence:
			blocks, open = append(blocks, *open), nil
		case open != nil:
			open.Text += line + "\n"
		}
		before = line
	}
	if open != nil {
		return nil, fmt.Errorf("%s:%d: the block has no end", path, open.Line)
	}
	return blocks, nil
}

// Span is a command in the text of the page, outside of blocks.
type Span struct {
	Line int // of the page
	Text string
}

var span = regexp.MustCompile("`(engram [^`]*)`")

// Spans returns the commands in the text of a page.
func Spans(path string) (spans []Span, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	fenced := false
	for i, line := range strings.Split(string(text), "\n") {
		if strings.HasPrefix(line, "```") {
			fenced = !fenced
		}
		if fenced {
			continue
		}
		for _, found := range span.FindAllStringSubmatch(line, -1) {
			spans = append(spans, Span{i + 1, found[1]})
		}
	}
	return spans, nil
}

// Command is a shell that types the block of a name, with other words for those of the page: old, new, old, new. There engram
// is the program at that path, by a link in dir.
func Command(ctx context.Context, path, name, engram, dir string, words ...string) (*exec.Cmd, error) {
	blocks, err := Read(path)
	if err != nil {
		return nil, err
	}
	for _, b := range blocks {
		if b.Name != name {
			continue
		}
		commands, err := reworded(b.Text, words)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: the block %q %w", path, b.Line, name, err)
		}
		return Shell(ctx, commands, engram, dir)
	}
	return nil, fmt.Errorf("%s has no block %q", path, name)
}

// SpanCommand is Command for a span of the text, which is named by what it says.
func SpanCommand(ctx context.Context, path, text, engram, dir string, words ...string) (*exec.Cmd, error) {
	spans, err := Spans(path)
	if err != nil {
		return nil, err
	}
	for _, s := range spans {
		if s.Text != text {
			continue
		}
		command, err := reworded(text, words)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: the command %w", path, s.Line, err)
		}
		return Shell(ctx, command, engram, dir)
	}
	return nil, fmt.Errorf("%s does not have the command `%s`", path, text)
}

// reworded has other words for those in a text, each of which must be there.
func reworded(text string, words []string) (string, error) {
	for i := 0; i < len(words); i += 2 {
		if !strings.Contains(text, words[i]) {
			return "", fmt.Errorf("does not have %q:\n%s", words[i], text)
		}
	}
	return strings.NewReplacer(words...).Replace(text), nil
}

// Shell is a shell that types commands, until one fails. In them engram is the program at that path, by a link in dir.
func Shell(ctx context.Context, commands, engram, dir string) (*exec.Cmd, error) {
	if err := os.Symlink(engram, filepath.Join(dir, "engram")); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "sh", "-e", "-c", commands)
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	return cmd, nil
}
