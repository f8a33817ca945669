package saving

import (
	"context"
	"fmt"
	"math"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/run"
)

// CheckRoom refuses a run if there is no room for one checkpoint, and warns if there is not enough
// for all. The ranks' files of the disk tier may be on the same file system. If there are any, the
// warning waits until these files have their space.
func (s *Saver) CheckRoom(ctx context.Context) error {
	var from checkpoint.Choice
	if s.cfg.Resume {
		var err error
		if from, err = s.choose(ctx); err != nil {
			return nil // loading reports the error
		}
	}
	saves := saves(&s.cfg.Config, from.Manifest.Step)
	if saves == 0 {
		return nil
	}
	room, known, err := s.store.Room(from)
	if err != nil || !known {
		return err
	}
	each, err := s.Bytes()
	if err != nil {
		return err
	}
	if err := noRoom(&s.cfg.Config, &room, each); err != nil {
		return err
	}
	if s.ranks == nil && s.plan.Layout.Spaces[graph.Disk].Peak > 0 {
		return nil
	}
	if text := littleRoom(&s.cfg.Config, &room, each, saves); text != "" {
		s.cfg.Warnf("%s", text)
	}
	return nil
}

// Bytes returns the disk space of one checkpoint, in blocks of its file system: the states, the
// model's files and the manifest.
func (s *Saver) Bytes() (int64, error) {
	parts, err := run.Parts(s.plan.Program, s.cfg.Ranks)
	if err != nil {
		return 0, err
	}
	files, err := s.modelFiles()
	if err != nil {
		return 0, fmt.Errorf("Config.Checkpoint %s: %w", s.cfg.Checkpoint, err)
	}
	record, err := s.Record()
	if err != nil {
		return 0, err
	}
	tensors := run.NewStates(s.plan.Program, platform.OneProcess(s.cfg.Ranks), nil).Tensors()
	m := checkpoint.Manifest{Step: s.cfg.Steps, PlanHash: s.planHash(), Ranks: s.cfg.Ranks, Zero: s.cfg.Zero, Run: record, Tensors: tensors}
	return s.store.Takes(m, parts, files)
}

// saves returns the number of checkpoints that a run still writes after done steps.
func saves(c *config.Config, done int) int64 {
	switch {
	case done >= c.Steps:
		return 0
	case c.SaveEvery == 0:
		return 1
	}
	n := c.Steps/c.SaveEvery - done/c.SaveEvery
	if c.Steps%c.SaveEvery > 0 {
		n++
	}
	return int64(n)
}

// noRoom refuses a file system that has no room for one checkpoint.
func noRoom(c *config.Config, r *checkpoint.Room, each int64) error {
	needs := r.Needs(each, 1)
	if needs <= r.Most {
		return nil
	}
	beside := ""
	if r.Goes > 0 {
		beside = fmt.Sprintf(", and Config.Keep %d makes %s free before", c.Keep, plan.Bytes(r.Goes))
	}
	return config.OfKind(fmt.Errorf("does not fit: a checkpoint takes %s, and the file system of Config.Checkpoint %s has %s free%s; free %s there, or give a folder of another one",
		plan.Bytes(each), c.Checkpoint, plan.Bytes(r.Most), beside, plan.Bytes(needs-r.Most)), plan.ErrDoesNotFit)
}

// littleRoom returns a warning if a file system has room for one checkpoint, but not for all that
// the run stores there at once; otherwise "".
func littleRoom(c *config.Config, r *checkpoint.Room, each, saves int64) string {
	needs := r.Needs(each, saves)
	if needs <= r.Free {
		return ""
	}
	what := english.Plural(int(saves), "checkpoint", "")
	if c.Keep > 0 {
		what += fmt.Sprintf(" with Config.Keep %d", c.Keep)
	}
	amount := plan.Bytes(needs)
	if needs == math.MaxInt64 {
		amount = "more than any file system has"
	}
	text := fmt.Sprintf("of %s, %s each, up to %s will lie in Config.Checkpoint %s at once, whose file system has %s free: some will not be saved; ",
		what, plan.Bytes(each), amount, c.Checkpoint, plan.Bytes(r.Free))
	switch keep := r.Keeps(each); {
	case keep > 0 && (c.Keep == 0 || keep < int64(c.Keep)):
		return text + fmt.Sprintf("Config.Keep %d fits", keep)
	case needs == math.MaxInt64:
		return text + "give Config.Keep and a larger file system"
	}
	return text + fmt.Sprintf("free %s there, or give a folder of another one", plan.Bytes(needs-r.Free))
}
