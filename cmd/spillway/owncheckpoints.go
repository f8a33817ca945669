package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/checkpoint"
)

// ownCheckpoints tells the checkpoints of a job from those that its folder held before it: a
// job that begins anew goes on from none of those, though it may have to begin again.
type ownCheckpoints struct {
	folder string
	before map[string]bool // by name and id; none where the job was to go on from them
}

// checkpointsOf looks at the folder of a job that has not begun.
func checkpointsOf(folder string, resumes bool) ownCheckpoints {
	o := ownCheckpoints{folder: folder, before: map[string]bool{}}
	if resumes {
		return o
	}
	there, _ := checkpoint.Scan(folder) // what can't be read the job tells
	for _, e := range there {
		o.before[e.Name+" "+e.Manifest.ID] = true
	}
	return o
}

// savedBy is checkpointsOf by train's flags.
func savedBy(fs *pflag.FlagSet) ownCheckpoints {
	resumes, _ := fs.GetBool("resume")
	return checkpointsOf(fs.Lookup("checkpoint").Value.String(), resumes)
}

// newest is the step of the newest one; false: there is none to go on from.
func (o ownCheckpoints) newest() (step int, found bool) {
	all, _ := checkpoint.Scan(o.folder)
	for _, e := range all {
		if !o.before[e.Name+" "+e.Manifest.ID] {
			step, found = e.Step, true
		}
	}
	return step, found
}

// names lists the checkpoints that are in the folder, whosever they are, which costs less than
// to read what they say.
func (o ownCheckpoints) names() (list []string) {
	found, _ := os.ReadDir(o.folder)
	for _, f := range found {
		if strings.HasPrefix(f.Name(), "step-") {
			list = append(list, f.Name())
		}
	}
	return list
}

// grew tells whether there is a checkpoint that was not: the job's, which has the folder to itself.
func (o ownCheckpoints) grew(before []string) bool {
	return slices.ContainsFunc(o.names(), func(name string) bool { return !slices.Contains(before, name) })
}

// resuming are the arguments of train with which the job goes on.
func (o ownCheckpoints) resuming(args []string) []string {
	if _, found := o.newest(); !found || slices.Contains(args, "--resume") {
		return args
	}
	return append(slices.Clone(args), "--resume")
}

// from says where a job goes on that has lost a rank.
func (o ownCheckpoints) from() (where string, step int) {
	step, found := o.newest()
	if !found {
		return "step 1", 0
	}
	return fmt.Sprintf("the checkpoint of step %d", step), step
}
