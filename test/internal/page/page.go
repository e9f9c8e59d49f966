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
		for i := 0; i < len(words); i += 2 {
			if !strings.Contains(b.Text, words[i]) {
				return nil, fmt.Errorf("%s:%d: the block %q does not have %q:\n%s", path, b.Line, name, words[i], b.Text)
			}
		}
		return Shell(ctx, strings.NewReplacer(words...).Replace(b.Text), engram, dir)
	}
	return nil, fmt.Errorf("%s has no block %q", path, name)
}

// Shell is a shell that types commands, of which engram is the program at that path, by a link in dir.
func Shell(ctx context.Context, commands, engram, dir string) (*exec.Cmd, error) {
	if err := os.Symlink(engram, filepath.Join(dir, "engram")); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", commands)
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	return cmd, nil
}
