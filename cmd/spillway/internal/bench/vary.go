package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// change is a row after the stages: stage 3 with other flags.
type change struct{ name, args string }

// ways are the settings that --vary can change, and their default values.
var ways = []struct {
	name   string
	values func(c *spillway.Config) []string
	args   func(c *spillway.Config, value string) string
}{
	{"offload", func(c *spillway.Config) []string {
		list := []string{"optimizer=host"}
		if c.Disk != "" {
			list = append(list, "optimizer=disk")
		}
		return list
	}, nil},
	{"recompute", func(*spillway.Config) []string { return []string{"selective", "full"} }, nil},
	{"precision", func(*spillway.Config) []string { return []string{"fp32", "bf16", "fp16"} }, nil},
	{"ranks", func(c *spillway.Config) (list []string) {
		for n := 1; n < c.Ranks; n *= 2 {
			list = append(list, fmt.Sprint(n))
		}
		return list
	}, func(c *spillway.Config, value string) string {
		return fmt.Sprintf("--ranks=%s --batch=%d --global-batch=%d", value, c.Batch, c.StepRows())
	}},
	{"accum-order", func(*spillway.Config) []string { return []string{"layer"} }, nil},
}

// varied parses a list such as recompute,offload=optimizer=host: each name stands for its default
// values, or has one.
func varied(list []string, c *spillway.Config) (changes []change, err error) {
	var names []string
	for _, w := range ways {
		names = append(names, w.name)
	}
	for _, item := range list {
		name, value, given := strings.Cut(item, "=")
		i := slices.Index(names, strings.ToLower(name))
		if i < 0 {
			return nil, fmt.Errorf("--vary %.80q: want a list of %s, each alone or with a value, as in recompute=full", item, strings.Join(names, ", "))
		}
		w := ways[i]
		values := []string{value}
		if !given {
			values = w.values(c)
		}
		for _, v := range values {
			args := "--" + w.name + "=" + v
			if w.args != nil {
				args = w.args(c, v)
			}
			if ch := (change{w.name + "=" + v, args}); !slices.Contains(changes, ch) {
				changes = append(changes, ch)
			}
		}
	}
	return changes, nil
}

// addVaried adds stage 3 with each change. Changes without effect and rejected ones are rows that
// say why they did not run.
func (s *session) addVaried(ctx context.Context, args, list []string) error {
	args = append(slices.Clone(args), "--zero=3")
	c, err := configOf(args)
	if err != nil {
		return err
	}
	changes, err := varied(list, &c)
	if err != nil {
		return err
	}
	for _, ch := range changes {
		base := args
		if strings.HasPrefix(ch.args, "--ranks=") { // keep the rows of a step; the accumulation follows from them
			base = without(args, "accum", "rank-shares")
		}
		err := s.add(ctx, ch.name, ch.name, with(base, strings.Fields(ch.args)...))
		switch {
		case errors.Is(err, context.Canceled):
			return err
		case err != nil:
			why := cli.Flagged(cli.PlainFlagError(err).Error())
			cli.Wrap(s.progress, "", "  ", ch.name+" will be missing: "+why)
			s.jobs = append(s.jobs, &job{Row: Row{Version: rowVersion, Zero: 3, Name: ch.name, Vary: ch.name, Ranks: c.Ranks, Missing: why}})
		case ch.name == "accum-order=layer" && c.Accum == 1:
			s.jobs[len(s.jobs)-1].Missing = "with one micro-batch a step there is no order; give --accum"
		default:
			s.jobs[len(s.jobs)-1].same(&s.jobs[3].Row)
		}
	}
	return nil
}

// same marks a job as missing if another row has the same configuration.
func (j *job) same(other *Row) {
	key := func(r *Row) string {
		return fmt.Sprint(r.Precision, r.Ranks, r.PlannedBytes, r.CommBytesPerStep, r.ClassPeak, *r.Predicted)
	}
	if j.Missing == "" && key(&j.Row) == key(other) {
		j.Missing = "it is what " + other.Name + " has"
	}
}
