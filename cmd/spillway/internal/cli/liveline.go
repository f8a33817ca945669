package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
)

// LiveLine is the last line of a terminal, which is overwritten again and again. It is at most as
// wide as the terminal: fields that do not fit are dropped, the last first. Only one goroutine may
// use it.
type LiveLine struct {
	w     io.Writer
	file  *os.File
	shown bool
	last  time.Time
}

// toLineEnd clears a terminal's line from the cursor to its end.
const toLineEnd = "\x1b[K"

// refreshEvery is the minimum time between two updates of a live line.
const refreshEvery = 100 * time.Millisecond

// NewLiveLine returns nil if w is not a terminal that can overwrite a line.
func NewLiveLine(w io.Writer) *LiveLine {
	f, ok := FileOf(w)
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	return &LiveLine{w: w, file: f}
}

// Show updates the line, unless the last update was less than refreshEvery ago; now forces it.
func (l *LiveLine) Show(fields []string, now bool) {
	if !now && time.Since(l.last) < refreshEvery {
		return
	}
	columns, _, err := term.GetSize(int(l.file.Fd()))
	if err != nil || columns < 1 {
		columns = Terminal
	}
	l.last, l.shown = time.Now(), true
	fmt.Fprint(l.w, "\r"+fitFields(fields, columns-1)+toLineEnd)
}

// Above writes a permanent line to w. It clears the live line l there, which reappears at its next
// update. l is nil if w is no terminal.
func Above(l *LiveLine, w io.Writer, text string) {
	if l != nil {
		l.clear()
	}
	fmt.Fprintln(w, text)
}

// clear erases the line.
func (l *LiveLine) clear() {
	if l.shown {
		fmt.Fprint(l.w, "\r"+toLineEnd)
	}
	l.shown = false
}

// End leaves the line as it is and starts a new one. A nil LiveLine does nothing.
func (l *LiveLine) End() {
	if l != nil && l.shown {
		fmt.Fprintln(l.w)
		l.shown = false
	}
}

// fitFields joins as many fields as fit into columns, from the left, and cuts the first if it alone
// is too wide.
func fitFields(fields []string, columns int) string {
	line := ""
	for _, f := range fields {
		if f == "" {
			continue
		}
		next := f
		if line != "" {
			next = line + "  " + f
		}
		if utf8.RuneCountInString(next) > columns {
			if line == "" {
				return string([]rune(next)[:max(columns, 0)])
			}
			break
		}
		line = next
	}
	return line
}

// Gauge draws the share done/of as a bar.
func Gauge(done, of int64) string {
	const width = 12
	full := 0
	if of > 0 {
		full = int(min(max(done, 0), of) * width / of)
	}
	return "[" + strings.Repeat("=", full) + strings.Repeat(" ", width-full) + "]"
}

// IsTerminal reports whether w is a terminal.
func IsTerminal(w io.Writer) bool {
	f, ok := FileOf(w)
	return ok && term.IsTerminal(int(f.Fd()))
}

// ReadsTerminal reports whether r is a terminal.
func ReadsTerminal(r io.Reader) bool {
	f, ok := r.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// Visible escapes characters that a terminal would interpret or not show: control bytes except line
// ends and tabs, and invalid UTF-8.
func Visible(s string) string {
	var b strings.Builder
	for i, r := range s {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(s[i:], "\uFFFD"):
			fmt.Fprintf(&b, "\\x%02x", s[i])
		case r == '\n' || r == '\t' || unicode.IsPrint(r):
			b.WriteRune(r)
		case r < utf8.RuneSelf:
			fmt.Fprintf(&b, "\\x%02x", r)
		default:
			fmt.Fprintf(&b, "\\u%04x", r)
		}
	}
	return b.String()
}
