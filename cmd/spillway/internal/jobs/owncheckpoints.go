package jobs

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// OwnCheckpoints tells the checkpoints that a job has written from those that its folder held
// before. A job without --resume never continues from the older ones, also when it is restarted.
type OwnCheckpoints struct {
	Folder string
	before map[string]bool // by name and id; none where the job was to go on from them
	held   filesys.Folder  // see hold
}

// Hold opens the folder for the job's attempts, and makes it where it is missing. One that
// nothing was written to goes with release.
func (o *OwnCheckpoints) Hold() (release func(), err error) {
	if o.Folder == "" {
		return func() {}, nil
	}
	f, made, err := filesys.MakeFolder(filesys.System, o.Folder)
	if err != nil {
		return nil, fmt.Errorf("--checkpoint %s: %w", o.Folder, err)
	}
	o.held = f
	return func() {
		made.Remove()
		_ = f.Close() // nothing was written through it
	}, nil
}

// Moved refuses another attempt where the path of the folder leads to another one by now: it
// may be another run's.
func (o *OwnCheckpoints) Moved() error {
	if o.held == nil {
		return nil
	}
	now, err := filesys.Open(o.Folder)
	if err != nil {
		return fmt.Errorf("not starting again: the checkpoint folder is gone: %w", err)
	}
	a, err := now.Info()
	b, herr := o.held.Info()
	if err = errors.Join(err, herr, now.Close()); err == nil && !filesys.Same(a, b) {
		err = fmt.Errorf("not starting again: %s is another folder than the one that the job began in (somebody renamed it, or retargeted a link); train --resume goes on in the one that has its checkpoints", o.Folder)
	}
	return err
}

// CheckpointsOf looks at the folder of a job that has not begun.
func CheckpointsOf(folder string, resumes bool) OwnCheckpoints {
	o := OwnCheckpoints{Folder: folder, before: map[string]bool{}}
	if resumes {
		return o
	}
	there, _ := checkpoint.Scan(folder) // what can't be read the job tells
	for _, e := range there {
		o.before[e.Name+" "+e.Manifest.ID] = true
	}
	return o
}

// SavedBy is checkpointsOf by train's flags.
func SavedBy(fs *pflag.FlagSet) OwnCheckpoints {
	resumes, _ := fs.GetBool("resume")
	return CheckpointsOf(fs.Lookup("checkpoint").Value.String(), resumes)
}

// Newest is the step of the newest one; false: there is none to go on from.
func (o OwnCheckpoints) Newest() (step int, found bool) {
	all, _ := checkpoint.Scan(o.Folder)
	for _, e := range all {
		if !o.before[e.Name+" "+e.Manifest.ID] {
			step, found = e.Step, true
		}
	}
	return step, found
}

// Names lists the checkpoints that are in the folder, whosever they are, which costs less than
// to read what they say.
func (o OwnCheckpoints) Names() (list []string) {
	found, _ := os.ReadDir(o.Folder)
	for _, f := range found {
		if strings.HasPrefix(f.Name(), "step-") {
			list = append(list, f.Name())
		}
	}
	return list
}

// Grew tells whether there is a checkpoint that was not: the job's, which has the folder to itself.
func (o OwnCheckpoints) Grew(before []string) bool {
	return slices.ContainsFunc(o.Names(), func(name string) bool { return !slices.Contains(before, name) })
}

// Resuming are the arguments of train with which the job goes on.
func (o OwnCheckpoints) Resuming(args []string) []string {
	if !o.resumes() || slices.Contains(args, "--resume") {
		return args
	}
	return append(slices.Clone(args), "--resume")
}

// resumes tells whether the job resumes what its folder has, in all of its files. In a folder
// that had no checkpoints it does so also before it has saved one, and goes on in its receipt.
func (o OwnCheckpoints) resumes() bool {
	_, found := o.Newest()
	return found || len(o.before) == 0
}

// From says where a job goes on that has lost a rank.
func (o OwnCheckpoints) From() (where string, step int) {
	step, found := o.Newest()
	if !found {
		return "step 1", 0
	}
	return fmt.Sprintf("the checkpoint of step %d", step), step
}
