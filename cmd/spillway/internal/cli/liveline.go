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

// LiveLine is a line at the foot of a terminal that is written over again and
// again. It never takes more than a terminal's line: fields that have no room are
// dropped, the last first. It is for one goroutine.
type LiveLine struct {
	w     io.Writer
	file  *os.File
	shown bool
	last  time.Time
}

// toLineEnd clears a terminal's line from the cursor on.
const toLineEnd = "\x1b[K"

// refreshEvery is the least time between two states of a live line.
const refreshEvery = 100 * time.Millisecond

// NewLiveLine returns nil where w is not a terminal that can overwrite a line.
func NewLiveLine(w io.Writer) *LiveLine {
	f, ok := FileOf(w)
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	return &LiveLine{w: w, file: f}
}

// Show writes the line, unless it did a moment ago; now writes it in any case.
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

// Above writes a line to w that stays, in place of a live line there, which its next state follows. l is
// nil where w is no terminal.
func Above(l *LiveLine, w io.Writer, text string) {
	if l != nil {
		l.clear()
	}
	fmt.Fprintln(w, text)
}

// clear takes the line away.
func (l *LiveLine) clear() {
	if l.shown {
		fmt.Fprint(l.w, "\r"+toLineEnd)
	}
	l.shown = false
}

// End leaves the line as it stands and goes to the next. On no terminal there is none.
func (l *LiveLine) End() {
	if l != nil && l.shown {
		fmt.Fprintln(l.w)
		l.shown = false
	}
}

// fitFields joins the fields that fit into so many columns, from the left; of the
// first, what fits.
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

// Gauge draws a part of a whole in a few columns.
func Gauge(done, of int64) string {
	const width = 12
	full := 0
	if of > 0 {
		full = int(min(max(done, 0), of) * width / of)
	}
	return "[" + strings.Repeat("=", full) + strings.Repeat(" ", width-full) + "]"
}

// IsTerminal says whether w is one.
func IsTerminal(w io.Writer) bool {
	f, ok := FileOf(w)
	return ok && term.IsTerminal(int(f.Fd()))
}

// ReadsTerminal says whether r is one.
func ReadsTerminal(r io.Reader) bool {
	f, ok := r.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// Visible escapes what a terminal would obey or not show: control bytes but line
// ends and tabs, and what is not UTF-8.
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
