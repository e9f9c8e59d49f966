package play

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

const (
	prompt   = "engram> "
	maxLine  = 1 << 20 // bytes of a command
	minLines = 6       // below the table, else a terminal is too small for one
)

// console reads commands and shows what happened: on a terminal with a live table above the prompt, else as plain lines.
type console struct {
	in     io.Reader
	echo   bool    // the commands come from a pipe or file, and are shown
	screen *screen // nil without a live table
	out    io.Writer
}

func newConsole(in io.Reader, out io.Writer) *console {
	c := &console{in: in, out: out, echo: true}
	if f, ok := in.(*os.File); ok && isTerminal(f) {
		c.echo = false
		if f, ok := out.(*os.File); ok && isTerminal(f) && os.Getenv("TERM") != "dumb" {
			c.screen = newScreen(f, os.Getenv("NO_COLOR") == "")
		}
	}
	return c
}

func isTerminal(f *os.File) bool {
	_, _, err := windowSize(f)
	return err == nil
}

// say shows a line. It is safe for concurrent use, as are all outputs.
func (c *console) say(format string, args ...any) {
	c.write(fmt.Sprintf(format, args...) + "\n")
}

func (c *console) write(text string) {
	if c.screen != nil {
		c.screen.write(text)
		return
	}
	_, _ = io.WriteString(c.out, text) // who reads it may have gone; play ends when its input does
}

// happened tells what no command asked for. A live table shows it already, and the line that is typed stays whole.
func (c *console) happened(text string) {
	if c.screen == nil || c.screen.over() {
		c.say("* %s", text)
	}
}

// restore gives the terminal back as it was.
func (c *console) restore() {
	if c.screen != nil {
		c.screen.close()
	}
}

// run shows the cluster as it starts, and then carries out commands until the input or ctx ends, or one is quit.
func (c *console) run(ctx context.Context, cl *cluster) error {
	l := &load{cluster: cl}
	defer l.stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		c.show(ctx, cl, l)
	}()
	defer func() { cancel(); <-shown }()

	c.say("Starting %s …", count(len(cl.list()), "member"))
	began := time.Now()
	p := &player{cluster: cl, load: l, say: c.say}
	if cl.settle(ctx) {
		c.say("All answer after %.1f s.", time.Since(began).Seconds())
	} else if ctx.Err() == nil {
		c.say("Not all answer yet: see status.")
	}
	p.welcome()
	lines := readLines(ctx, c.in)
	for {
		c.write(prompt)
		select {
		case <-ctx.Done():
			c.write("\n")
			return nil
		case line, ok := <-lines:
			if !ok {
				c.write("\n")
				return nil
			}
			if line.err != nil {
				return fmt.Errorf("standard input: %w", line.err)
			}
			if c.echo {
				c.write(line.text + "\n")
			} else if c.screen != nil {
				c.screen.typed(line.text)
			}
			if p.do(ctx, line.text) {
				return nil
			}
		}
	}
}

type inputLine struct {
	text string
	err  error
}

// readLines reads until the input ends. A read cannot be interrupted, so the goroutine may stay in one until play ends.
func readLines(ctx context.Context, in io.Reader) <-chan inputLine {
	lines := make(chan inputLine)
	go func() {
		defer close(lines)
		s := bufio.NewScanner(in)
		s.Buffer(nil, maxLine)
		for s.Scan() {
			select {
			case lines <- inputLine{text: strings.TrimSpace(s.Text())}:
			case <-ctx.Done():
				return
			}
		}
		if s.Err() != nil {
			select {
			case lines <- inputLine{err: s.Err()}:
			case <-ctx.Done():
			}
		}
	}()
	return lines
}

// show keeps looking at the members. With a screen the table follows.
func (c *console) show(ctx context.Context, cl *cluster, l *load) {
	for {
		if c.screen != nil {
			c.screen.draw(statusLines(cl, l))
		}
		if !pause(ctx, lookPause) {
			return
		}
		cl.look(ctx)
	}
}

// statusLine is a line of the status, and how it stands out.
type statusLine struct {
	text string
	look style
}

type style int

const (
	plain style = iota
	bold
	good
	bad
)

// statusLines are the table and what it means.
func statusLines(cl *cluster, l *load) []statusLine {
	rows := cl.rows()
	lines := tableLines(rows)
	out := []statusLine{{lines[0], bold}}
	for i, text := range lines[1:] {
		look := plain
		if !rows[i].well {
			look = bad
		}
		out = append(out, statusLine{text, look})
	}
	q := cl.quorum()
	look := good
	if !q.majority() || q.leader == "" {
		look = bad
	}
	out = append(out, statusLine{q.words(), look})
	if words := l.words(); words != "" {
		out = append(out, statusLine{words, plain})
	}
	return out
}
