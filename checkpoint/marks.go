package checkpoint

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// A Divergence is a training attempt that ended because values were not finite.
type Divergence struct {
	Step     int               `json:"step"`           // the step whose values were not finite, from 1
	From     string            `json:"from,omitempty"` // name of the checkpoint that it last resumed from or wrote, "" for none
	Settings map[string]string `json:"settings"`       // of the attempt, by flag
}

// mark is one line of the marks file: one event in the folder.
type mark struct {
	Event      string      `json:"event"`          // one of the constants below
	Key        string      `json:"key,omitempty"`  // of the checkpoint it happened to
	Keys       []string    `json:"keys,omitempty"` // left: checkpoints newer than the one that a run resumed from
	Name       string      `json:"name,omitempty"` // working: a temporary name
	Divergence *Divergence `json:"divergence,omitempty"`
}

const (
	markConfirmed = "confirmed" // an update was applied after the checkpoint
	markDiverged  = "diverged"  // a run stopped non-finite before its first update after the checkpoint; Key may be empty
	markEvaluated = "evaluated" // a run did the evaluation that the checkpoint says is due
	markLeft      = "left"      // a run resumed from an older checkpoint
	markWorking   = "working"   // the store is about to use a temporary name
)

// Marks is the record of events in a folder of checkpoints. Readers use it too.
type Marks struct {
	confirmed   map[string]bool
	evaluated   map[string]bool
	diverged    map[string]bool
	left        map[string]bool
	working     []string
	Divergences []Divergence // oldest first
	// Damaged says which lines were skipped, and why; nil if none were.
	Damaged error
	damaged int   // lines
	failed  error // of the reading
	whole   int64 // bytes up to the last complete line: later bytes were cut off by a kill
}

// Limits when marks are read: of the file, which a Store rewrites long before it is that large, and
// of one line.
const (
	maxMarks = 1 << 30
	maxLine  = 16 << 20
)

// Marks reads the folder's marks; without a marks file they are empty. Lines with a wrong
// checksum are skipped and reported in Damaged.
func (d Dir) Marks() (Marks, error) {
	if d.f == nil {
		return parseMarks("", strings.NewReader("")), nil
	}
	return readMarks(d.f, nil)
}

// readMarks reads the marks file after check has accepted it.
func readMarks(in filesys.Folder, check func(filesys.Info) error) (Marks, error) {
	path := filepath.Join(in.Path(), marksName)
	f, err := filesys.OpenRegular(in, marksName)
	if errors.Is(err, os.ErrNotExist) {
		return parseMarks(path, strings.NewReader("")), nil
	}
	if err != nil {
		return Marks{}, fmt.Errorf("read marks: %w", err)
	}
	defer f.Close()
	if check != nil {
		st, err := f.Stat()
		if err == nil {
			err = check(st)
		}
		if err != nil {
			return Marks{}, err
		}
	}
	m := parseMarks(path, io.LimitReader(f, maxMarks))
	if m.failed != nil {
		return Marks{}, fmt.Errorf("read marks %s: %w", path, m.failed)
	}
	return m, nil
}

// parseMarks reads lines of "CRC-32C of the JSON, a space, JSON".
func parseMarks(path string, text io.Reader) Marks {
	m := Marks{confirmed: map[string]bool{}, evaluated: map[string]bool{}, diverged: map[string]bool{}, left: map[string]bool{}}
	lines := bufio.NewScanner(text)
	lines.Buffer(nil, maxLine)
	lines.Split(func(data []byte, _ bool) (int, []byte, error) {
		i := bytes.IndexByte(data, '\n')
		if i < 0 {
			return 0, nil, nil // an incomplete last line
		}
		return i + 1, data[:i], nil
	})
	for number := 1; lines.Scan(); number++ {
		line := lines.Bytes()
		m.whole += int64(len(line) + 1)
		var v mark
		crc, body, ok := bytes.Cut(line, []byte(" "))
		if !ok || sum(body) != string(crc) || json.Unmarshal(body, &v) != nil {
			m.damage(fmt.Errorf("%w: %s: line %d does not have the checksum that it says", ErrDamaged, path, number))
			continue
		}
		m.add(v)
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		m.damage(fmt.Errorf("%w: %s: what follows byte %d is no line", ErrDamaged, path, m.whole))
	default:
		m.failed = err
	}
	return m
}

// mostDamage is the maximum number of damaged lines that are reported.
const mostDamage = 10

func (m *Marks) damage(err error) {
	if m.damaged++; m.damaged <= mostDamage {
		m.Damaged = errors.Join(m.Damaged, err)
	}
}

func (m *Marks) add(v mark) {
	switch v.Event {
	case markConfirmed:
		m.confirmed[v.Key] = true
		delete(m.left, v.Key)
		delete(m.diverged, v.Key)
	case markDiverged:
		if v.Key != "" {
			m.diverged[v.Key] = true
		}
		if v.Divergence != nil {
			m.Divergences = append(m.Divergences, *v.Divergence)
		}
	case markEvaluated:
		m.evaluated[v.Key] = true
	case markLeft:
		for _, key := range v.Keys {
			m.left[key] = true
		}
	case markWorking:
		if ownTemp.MatchString(v.Name) {
			m.working = append(m.working, v.Name)
		}
	}
}

// Confirmed tells whether an update was applied after the checkpoint.
func (m *Marks) Confirmed(c Manifest) bool { return m.confirmed[c.key()] }

// Diverged tells whether a run stopped non-finite right after the checkpoint.
func (m *Marks) Diverged(c Manifest) bool { return m.diverged[c.key()] }

// Left tells whether a run resumed from an older checkpoint than this one.
func (m Marks) Left(c Manifest) bool { return m.left[c.key()] }

// lines returns the marks that still matter for entries and for existing temporary names. They
// replace a long marks file.
func (m *Marks) lines(entries []Entry, names []string) []mark {
	var out []mark
	var left []string
	for _, e := range entries {
		key := e.Manifest.key()
		if e.Err != nil {
			continue
		}
		if m.confirmed[key] {
			out = append(out, mark{Event: markConfirmed, Key: key})
		}
		if m.evaluated[key] {
			out = append(out, mark{Event: markEvaluated, Key: key})
		}
		if m.diverged[key] {
			out = append(out, mark{Event: markDiverged, Key: key})
		}
		if m.left[key] {
			left = append(left, key)
		}
	}
	if len(left) > 0 {
		out = append(out, mark{Event: markLeft, Keys: left})
	}
	for _, name := range m.working {
		if slices.Contains(names, name) {
			out = append(out, mark{Event: markWorking, Name: name})
		}
	}
	for _, d := range m.Divergences[max(0, len(m.Divergences)-maxDivergences):] {
		out = append(out, mark{Event: markDiverged, Divergence: &d})
	}
	return out
}

// maxDivergences is how many divergences a rewritten marks file keeps, the newest.
const maxDivergences = 100

func (v mark) line() ([]byte, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return slices.Concat([]byte(sum(body)), []byte(" "), body, []byte("\n")), nil
}
