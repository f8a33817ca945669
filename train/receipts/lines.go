package receipts

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/receipt"
)

// Lines writes the lines of a run's receipt. A nil *Lines writes none.
type Lines struct {
	// Failed says that the last line could not be written, and a warning was given.
	Failed bool
	Async  bool           // checkpoints are written while later steps run
	Steps  []receipt.Step // since the last line

	Log    *receipt.Log // nil: nothing is written
	rows   []byte       // hash of each row of the current step
	took   time.Duration
	synced time.Time // when a line was last synced
}

// Open opens the receipt of a run at a step and writes the line with which it starts or resumes.
// follows says that a checkpoint names the receipt. describe returns everything that the results of
// the following steps depend on; line returns a line about the current states.
func Open(c *config.Config, folders filesys.Opener, step int, follows bool, describe func() (*receipt.Run, error), line func() (receipt.Record, error)) (p *Lines, head string, err error) {
	began := time.Now()
	about, err := describe()
	if err != nil {
		return nil, "", fmt.Errorf("Config.Receipt: %w", err)
	}
	log, left, err := receipt.Continue(folders, c.Receipt, step)
	if err != nil {
		return nil, "", fmt.Errorf("Config.Receipt: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, log.Close())
		}
	}()
	if follows && byOthers(log.Cut) {
		return nil, "", config.Refuse("Config.Receipt %.80q, which the checkpoint of step %d names, goes on behind it to step %d by way of "+
			"other checkpoints: those may be a copy's; give Config.Receipt %s to replace these steps, or another file",
			c.Receipt, step, left.Step, planner.Shell([]string{c.Receipt}))
	}
	about.Left = left
	now, err := line()
	if err != nil {
		return nil, "", err
	}
	place, err := otherStates(log, step, receipt.Hashed{Tensors: about.Tensors, Ranges: now.Ranges})
	if err != nil {
		return nil, "", fmt.Errorf("Config.Receipt: %w", err)
	}
	if place != nil {
		return nil, "", config.Refuse("Config.Receipt %.80q: after step %d it has another %s, than the checkpoint that the run goes on from; go on from another checkpoint, or give another file", c.Receipt, step, place)
	}
	now.Run = about
	if err := log.Append(now, true); err != nil {
		return nil, "", fmt.Errorf("Config.Receipt: %w", err)
	}
	return &Lines{Log: log, took: time.Since(began)}, log.Head(), nil
}

// byOthers tells whether any line after a checkpoint belongs to another checkpoint, or to a run
// that resumed from one. The last line's checkpoint may not have been saved; neither may the last
// one that was written asynchronously.
func byOthers(cut []receipt.Line) bool {
	saved := receipt.Saved(cut)
	inDoubt := true
	for i, l := range slices.Backward(cut) {
		last := i == len(cut)-1
		if !last && (l.Run != nil || saved[l.Step] && !(l.Async && inDoubt)) {
			return true
		}
		inDoubt = inDoubt && !l.Saved
	}
	return false
}

// otherStates returns the first difference between the states and those of the last line; nil if
// the last line is about another step.
func otherStates(log *receipt.Log, step int, now receipt.Hashed) (*receipt.Place, error) {
	last := len(log.Lines) - 1
	if last < 0 || log.Lines[last].Step != step {
		return nil, nil
	}
	ranges, err := log.Ranges(last)
	if err != nil {
		return nil, err
	}
	return receipt.Differ(receipt.Hashed{Tensors: log.Run(last).Tensors, Ranges: ranges}, now), nil
}

// Write writes a line about the steps since the last line, if there are any, and returns its hash.
// saved says that a checkpoint of the same states follows. The lines of a checkpoint and of the end are
// synced at once; others at most once a second, since a resumed run repeats the steps after a
// checkpoint.
func (p *Lines) Write(saved, last bool, line func() (receipt.Record, error)) (head string, err error) {
	if p == nil || p.Log == nil || len(p.Steps) == 0 {
		return "", nil
	}
	began := time.Now()
	defer func() { p.took += time.Since(began) }()
	now, err := line()
	if err != nil {
		return "", err
	}
	now.Steps, now.Saved, now.Async = p.Steps, saved, saved && p.Async
	sync := saved || last || began.Sub(p.synced) >= time.Second
	if err := p.Log.Append(now, sync); err != nil {
		return "", fmt.Errorf("Config.Receipt: %w", err)
	}
	if sync {
		p.synced = began
	}
	p.Steps, p.Failed = nil, false
	return p.Log.Head(), nil
}

// Begin allocates the hashes for the rows of a step.
func (p *Lines) Begin(s *data.Sampler, step int) {
	if p != nil {
		p.rows = make([]byte, (s.Tell(step+1)-s.Tell(step))*sha256.Size)
	}
}

// Filled hashes the rows of a micro-batch. It may be called concurrently for different ones.
func (p *Lines) Filled(s *data.Sampler, step, micro, rank int, m *data.Micro, rows int) {
	if p == nil {
		return
	}
	var b []byte
	for row := range rows {
		if s.IsPadding(step, micro, rank, row) {
			continue
		}
		b = appendInts(appendInts(b[:0], part(m.Tokens, row, rows)), part(m.Targets, row, rows))
		for _, in := range m.Inputs {
			for _, v := range part(in, row, rows) {
				b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
			}
		}
		sum := sha256.Sum256(b)
		copy(p.rows[(s.GlobalSample(step, micro, rank, row)-s.Tell(step))*sha256.Size:], sum[:])
	}
}

// part returns the elements of one of rows equal rows of all.
func part[T any](all []T, row, rows int) []T {
	n := len(all) / rows
	return all[row*n : (row+1)*n]
}

func appendInts(b []byte, v []int32) []byte {
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	return b
}

// Ended adds a finished step to the next line, with the hash of its data.
func (p *Lines) Ended(s receipt.Step) {
	if p == nil {
		return
	}
	sum := sha256.Sum256(p.rows)
	s.Data = hex.EncodeToString(sum[:])
	p.Steps = append(p.Steps, s)
}

// Close closes the file.
func (p *Lines) Close() error {
	if p == nil || p.Log == nil {
		return nil
	}
	log := p.Log
	p.Log = nil
	if err := log.Close(); err != nil {
		return fmt.Errorf("Config.Receipt: %w", err)
	}
	return nil
}

// Written summarizes what a run has written of its receipt.
type Written struct {
	Lines   int
	Head    string  // SHA-256 of the last line, which chains all lines before it
	Seconds float64 // time spent on hashing and writing
}

// Written returns a summary of the written lines; nil if no receipt is written.
func (p *Lines) Written() *Written {
	if p == nil || p.Log == nil {
		return nil
	}
	return &Written{len(p.Log.Lines), p.Log.Head(), p.took.Seconds()}
}
