package processes

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
)

// screen is the contents of a terminal after the written bytes: its lines, and the number of lines
// that were made by running over the right edge.
type screen struct {
	columns int
	lines   []string
	wrapped int
}

func (s *screen) write(text string) {
	if len(s.lines) == 0 {
		s.lines = []string{""}
	}
	column := 0
	for len(text) > 0 {
		last := &s.lines[len(s.lines)-1]
		if rest, ok := strings.CutPrefix(text, "\x1b[K"); ok {
			*last = string([]rune(*last)[:min(column, utf8.RuneCountInString(*last))])
			text = rest
			continue
		}
		r, n := utf8.DecodeRuneInString(text)
		text = text[n:]
		switch r {
		case '\r':
			column = 0
		case '\n':
			s.lines = append(s.lines, "")
		default:
			if column == s.columns {
				s.wrapped++
				s.lines, column = append(s.lines, ""), 0
				last = &s.lines[len(s.lines)-1]
			}
			row := []rune(*last)
			for len(row) <= column {
				row = append(row, ' ')
			}
			row[column] = r
			*last = string(row)
			column++
		}
	}
}

// onTerminal runs a command whose standard output and error are a pseudo-terminal with a number of
// columns.
func onTerminal(t *testing.T, columns int, args ...string) (status int, bytes string) {
	t.Helper()
	master, tty := pseudoTerminal(t, columns)
	read := make(chan string)
	go func() {
		text, _ := io.ReadAll(master) // ends with EIO once the other side is closed
		read <- string(text)
	}()
	status = root.Run(context.Background(), args, tty, tty)
	require.NoError(t, tty.Close())
	return status, <-read
}

// pseudoTerminal opens a pseudo-terminal with a number of columns.
func pseudoTerminal(t *testing.T, columns int) (master, tty *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no pseudo-terminals here: %v", err)
	}
	t.Cleanup(func() { master.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	if tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Skipf("no pseudo-terminals here: %v", err)
	}
	require.NoError(t, unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: uint16(columns)}))
	return master, tty
}

func TestTerminal(t *testing.T) {
	text := writeFile(t, "held.txt", strings.Repeat("It was the best of times, it was the worst of times. ", 40))
	for _, columns := range []int{60, 80, 200} {
		t.Run(fmt.Sprint(columns), func(t *testing.T) {
			status, bytes := onTerminal(t, columns, tinyWith("--steps", "6", "--tokenizer", "bytes", "--eval-data", text, "--eval-every", "2", "--eval-steps", "1")...)
			require.Equal(t, 0, status, bytes)
			require.Contains(t, bytes, "\r\x1b[K", "the live line was never overwritten")
			live := 0
			for _, part := range strings.FieldsFunc(bytes, func(r rune) bool { return r == '\r' || r == '\n' }) {
				part = strings.TrimSuffix(part, "\x1b[K")
				if strings.Contains(part, "/6 [") {
					live++
					require.Less(t, utf8.RuneCountInString(part), columns, part)
					require.Equal(t, columns == 200, strings.Contains(part, "planned"), "the memory is the last field: %q", part)
					require.Contains(t, part, "loss ")
				}
			}
			require.Greater(t, live, 0)
			s := screen{columns: columns}
			s.write(bytes)
			shown := strings.Join(s.lines, "\n")
			require.Contains(t, shown, "step 2: held-out loss ")
			require.Contains(t, shown, "step 4: held-out loss ")
			require.Contains(t, shown, "bits a byte")
			require.Contains(t, shown, "\nheld-out loss ", "the summary has it too")
			lines := 0
			for _, line := range s.lines {
				if strings.Contains(line, "/6 [") {
					lines++
				}
			}
			require.LessOrEqual(t, lines, 1, "the live line scrolls:\n%s", shown)
		})
	}
}

// A plan that searches shows it on a terminal, and erases the line afterwards.
func TestSearchIsSaidOnATerminal(t *testing.T) {
	args := []string{"plan", "--model", filepath.Join(testdata, "gpt2"), "--batch", "1", "--seq", "16", "--device-memory", "10KB"}
	const said = "\rit does not fit; searching for what would make it fit …\x1b[K"
	status, bytes := onTerminal(t, 80, args...)
	require.Equal(t, cli.ExitDoesNotFit, status, bytes)
	require.Contains(t, bytes, said+"\r\x1b[K")
	require.Less(t, strings.Index(bytes, said), strings.Index(bytes, "Device memory"), "it is said before the report")
	piped := command(args...)
	require.NotContains(t, piped.stdout+piped.stderr, "searching")
	_, bytes = onTerminal(t, 80, append(args, "--fit")...)
	require.Contains(t, bytes, "\rsearching for the fastest configuration that fits …\x1b[K\r")
}

func TestPipedOutputHasNoControlBytes(t *testing.T) {
	text := writeFile(t, "held.txt", strings.Repeat("It was the age of wisdom. ", 80))
	got := command(tinyWith("--steps", "4", "--tokenizer", "bytes", "--eval-data", text, "--eval-every", "2", "--eval-steps", "1")...)
	require.Equal(t, 0, got.status, got.stderr)
	require.NotContains(t, got.stderr+got.stdout, "\x1b")
	require.NotContains(t, got.stderr+got.stdout, "\r")
	require.Equal(t, 2, strings.Count(got.stderr, "held-out loss "), got.stderr)
	require.Contains(t, got.stdout, "held-out loss ")
}

func TestVisible(t *testing.T) {
	require.Equal(t, "a\tb\nc\\x1b[2J\\x00\\x7fé\\xff\\u0085\\u202e", cli.Visible("a\tb\nc\x1b[2J\x00\x7fé\xff\u0085\u202e"))
	require.Equal(t, "\uFFFD", cli.Visible("\uFFFD"))
}

// Sampled text on a terminal has no control bytes and is valid UTF-8.
func TestGeneratedTextOnATerminal(t *testing.T) {
	status, bytes := onTerminal(t, 80, "generate", "--model", filepath.Join(testdata, "gpt2"), "--prompt", "a\x1b[2Jb", "--tokens", "50", "--temperature", "2", "--top-k", "0", "--seq", "64")
	require.Equal(t, 0, status, bytes)
	require.True(t, utf8.ValidString(bytes))
	require.NotContains(t, bytes, "\x1b")
	require.Contains(t, bytes, `a\x1b[2Jb`)
	require.Contains(t, bytes, "50 tokens, ")
}

// train's searches are shown too, and erased before their results.
func TestTrainSaysThatItSearches(t *testing.T) {
	const planning = "\rplanning; where it does not fit, searching for what would make it fit …\x1b[K"
	status, bytes := onTerminal(t, 80, tinyWith("--device-memory", "10KB")...)
	require.Equal(t, cli.ExitDoesNotFit, status, bytes)
	require.Contains(t, bytes, planning+"\r\x1b[Kspillway: ")
	status, bytes = onTerminal(t, 80, tinyWith("--device-memory", "10KB", "--fit")...)
	require.Equal(t, cli.ExitDoesNotFit, status, bytes)
	require.Contains(t, bytes, "\rsearching for the fastest configuration that fits …\x1b[K\rnothing fits; searching for what would …\x1b[K\r\x1b[Kspillway: ")
	status, bytes = onTerminal(t, 80, tinyWith("--steps", "1", "--device-memory", "10MB", "--recompute", "auto")...)
	require.Equal(t, 0, status, bytes)
	require.Contains(t, bytes, "\rchoosing what is computed again, as little as the cap asks for …\x1b[K\r\x1b[Kmodel ")
}
