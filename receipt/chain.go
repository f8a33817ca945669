package receipt

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Line is a parsed line of a receipt. It lacks Ranges, which are read again when needed.
type Line struct {
	Record
	Hash     string
	at, size int64
}

// Saved returns the steps of the lines after which a checkpoint was saved, as far as the lines
// show. Whether the last line's checkpoint was saved is not known.
func Saved(lines []Line) map[int]bool {
	saved := map[int]bool{}
	for _, l := range lines {
		for _, step := range l.Unsaved {
			delete(saved, step)
		}
		if l.Saved {
			saved[l.Step] = true
		}
	}
	return saved
}

// Chain is a receipt's lines, each verified against the line before.
type Chain struct {
	Lines []Line
	// Torn is the problem with the last line if all others are valid. Either the line was cut off
	// and does not count, or the error is a *Broken.
	Torn error
	f    filesys.File
}

// Broken is the error for a line that does not follow from the one before or has invalid
// contents.
type Broken struct {
	Path string
	Line int // from 1
	// Step is the step of the line before; 0: none.
	Step int
	Why  error
}

func (e *Broken) Error() string {
	return fmt.Sprintf("%s: the chain breaks at line %d, behind step %d: %v", e.Path, e.Line, e.Step, e.Why)
}

func (e *Broken) Unwrap() error { return e.Why }

// start is the beginning of every receipt.
var start = []byte(`{"prev":"","step":`)

// errForeign is the error for an existing file that is not a receipt.
var errForeign = errors.New("it is there already and holds no receipt")

// open opens a file in its folder; os.O_CREATE in flag also makes the folder.
func open(o filesys.Opener, path string, flag int) (in filesys.Folder, f filesys.File, err error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, nil, err
	}
	if flag&os.O_CREATE == 0 {
		in, err = o.Open(filepath.Dir(abs))
	} else {
		var made filesys.Made
		in, made, err = filesys.MakeFolder(o, filepath.Dir(abs))
		made.Stay()
	}
	if err != nil {
		return nil, nil, err
	}
	if f, err = in.OpenFile(filepath.Base(abs), flag|filesys.NoWait, 0o666); err == nil {
		var st filesys.Info
		if st, err = f.Stat(); err == nil && !st.Mode.IsRegular() {
			err = fmt.Errorf("%s is not a regular file", f.Name())
		}
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}
	if err != nil {
		return nil, nil, errors.Join(err, in.Close())
	}
	return in, f, nil
}

// Holds tells whether there is a receipt at a path. Any other existing file is an error.
func Holds(o filesys.Opener, path string) (bool, error) {
	in, f, err := open(o, path, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	head := make([]byte, len(start))
	n, err := f.ReadAt(head, 0)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if err == nil && !bytes.Equal(head[:n], start[:n]) {
		err = errForeign
	}
	return n > 0, errors.Join(err, f.Close(), in.Close())
}

// errCut is the error for a last line without a newline.
var errCut = errors.New("the last line was cut off as it was written: it never counted")

// Read opens a receipt and verifies its chain. The error is a *Broken if the chain breaks
// before the last line.
func Read(o filesys.Opener, path string) (*Chain, error) {
	in, f, err := open(o, path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	c := &Chain{f: f}
	if err := errors.Join(c.follow(), in.Close()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return c, nil
}

// Close closes the file.
func (c *Chain) Close() error { return c.f.Close() }

// follow reads and verifies the lines.
func (c *Chain) follow() error {
	st, err := c.f.Stat()
	if err != nil {
		return err
	}
	lines := bufio.NewReaderSize(io.NewSectionReader(c.f, 0, st.Size), 1<<20)
	var run *Run
	at, prev := int64(0), ""
	for n := 1; ; n++ {
		text, err := lines.ReadBytes('\n')
		switch {
		case errors.Is(err, io.EOF) && len(text) > 0:
			c.Torn = errCut
			return nil
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		line := Line{at: at, size: int64(len(text)), Hash: HashOf(text)}
		if why := line.read(text, &run, prev, c.step()); why != nil {
			broken := &Broken{Path: c.f.Name(), Line: n, Step: c.step(), Why: why}
			if at += line.size; at < st.Size {
				return broken
			}
			c.Torn = broken
			return nil
		}
		at, prev, line.Ranges = at+line.size, line.Hash, nil
		c.Lines = append(c.Lines, line)
	}
}

// read parses a line's text and verifies it against the hash prev and the step at of the line
// before. run is the newest Run.
func (l *Line) read(text []byte, run **Run, prev string, at int) error {
	if err := json.Unmarshal(text, &l.Record); err != nil {
		return err
	}
	// The line must be exactly as it is written: a name in another case, or an unknown one, would
	// be ignored, and no later line's hash protects the last line.
	if written, err := json.Marshal(l.Record); err != nil || !bytes.Equal(append(written, '\n'), text) {
		return errors.New("it is not as a receipt's lines are written")
	}
	if l.Prev != prev {
		return fmt.Errorf("it follows a line of SHA-256 %.80q, and the line before has %q", l.Prev, prev)
	}
	if l.Run != nil {
		*run = l.Run
	}
	return l.check(*run, at)
}

// step is the last line's step; 0 if there is no line.
func (c *Chain) step() int {
	if len(c.Lines) == 0 {
		return 0
	}
	return c.Lines[len(c.Lines)-1].Step
}

// Ranges returns the hashes of line n's ranges, by tensor.
func (c *Chain) Ranges(n int) ([][]byte, error) {
	text := make([]byte, c.Lines[n].size)
	if _, err := c.f.ReadAt(text, c.Lines[n].at); err != nil {
		return nil, err
	}
	if HashOf(text) != c.Lines[n].Hash {
		return nil, fmt.Errorf("%s has changed while it was read", c.f.Name())
	}
	var r Record
	err := json.Unmarshal(text, &r)
	return r.Ranges, err
}

// Run returns the Run that applies to line n: what its steps, or those after it, depend on.
func (c *Chain) Run(n int) *Run {
	for c.Lines[n].Run == nil {
		n--
	}
	return c.Lines[n].Run
}

// Has tells whether a line of the chain has the hash.
func (c *Chain) Has(hash string) bool {
	return slices.ContainsFunc(c.Lines, func(l Line) bool { return l.Hash == hash })
}

// Head returns the hash of the last line, which depends on the complete chain.
func (c *Chain) Head() string {
	if len(c.Lines) == 0 {
		return ""
	}
	return c.Lines[len(c.Lines)-1].Hash
}

// Log is a receipt that a run writes. Its methods are for one goroutine.
type Log struct {
	*Chain
	// Cut holds the lines after the step resumed from; the next Append removes them.
	Cut []Line
	in  filesys.Folder
	end int64
}

// Continue opens a receipt for a run after step steps, and creates it if there is none. Later
// lines and a cut-off last line belong to an earlier attempt: left describes the removed ones,
// nil if there are none. With step 0 all lines are removed.
func Continue(o filesys.Opener, path string, step int) (l *Log, left *Left, err error) {
	in, f, err := open(o, path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, nil, err
	}
	l = &Log{Chain: &Chain{f: f}, in: in}
	err = l.follow()
	if _, broken := errors.AsType[*Broken](err); broken && l.step() >= step { // after a crash of the machine, anything may follow the lines that were synced
		err = nil
	}
	if err == nil {
		keep := len(l.Lines)
		for keep > 0 && (step == 0 || l.Lines[keep-1].Step > step) {
			keep--
		}
		if keep < len(l.Lines) {
			last := l.Lines[len(l.Lines)-1]
			left = &Left{last.Step, last.Hash}
		}
		l.Lines, l.Cut = l.Lines[:keep:keep], l.Lines[keep:]
		for _, line := range l.Lines {
			l.end = line.at + line.size
		}
		l.Torn = nil
	}
	if err != nil {
		return nil, nil, errors.Join(err, l.Close())
	}
	return l, left, nil
}

// Close makes all lines durable and closes the file.
func (l *Log) Close() error { return errors.Join(l.f.Sync(), l.f.Close(), l.in.Close()) }

// Append writes a line at the end. With sync this line and all before it are durable when
// Append returns.
func (l *Log) Append(r Record, sync bool) error {
	r.Prev = l.Head()
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	text = append(text, '\n')
	line := Line{Record: r, Hash: HashOf(text), at: l.end, size: int64(len(text))}
	if err = l.f.Truncate(l.end); err == nil { // removes lines of an earlier attempt, or of a failed write
		_, err = l.f.WriteAt(text, l.end)
	}
	if err == nil && sync {
		err = l.f.Sync()
	}
	if err == nil && len(l.Lines) == 0 {
		err = l.in.Sync()
	}
	if err != nil {
		return err
	}
	line.Ranges = nil
	l.end += line.size
	l.Lines = append(l.Lines, line)
	return nil
}
