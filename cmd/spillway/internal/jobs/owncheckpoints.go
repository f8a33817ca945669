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

// OwnCheckpoints distinguishes the checkpoints that a job wrote from those already in its folder. A
// job without --resume never continues from the older ones, even after a restart.
type OwnCheckpoints struct {
	Folder string
	before map[string]bool // by name and id; empty with --resume
	held   filesys.Folder  // see Hold
}

// Hold opens the folder for the job's attempts and creates it if it is missing. release removes a
// created folder that is still empty.
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
		_ = f.Close() // no data was written through it
	}, nil
}

// Moved returns an error if the folder's path now leads to another folder, which may belong to
// another run.
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

// CheckpointsOf reads the folder of a job before it begins.
func CheckpointsOf(folder string, resumes bool) OwnCheckpoints {
	o := OwnCheckpoints{Folder: folder, before: map[string]bool{}}
	if resumes {
		return o
	}
	there, _ := checkpoint.Scan(folder) // the job reports unreadable checkpoints
	for _, e := range there {
		o.before[e.Name+" "+e.Manifest.ID] = true
	}
	return o
}

// SavedBy calls CheckpointsOf with train's flags.
func SavedBy(fs *pflag.FlagSet) OwnCheckpoints {
	resumes, _ := fs.GetBool("resume")
	return CheckpointsOf(fs.Lookup("checkpoint").Value.String(), resumes)
}

// Newest returns the step of the job's newest checkpoint; false: there is none.
func (o OwnCheckpoints) Newest() (step int, found bool) {
	all, _ := checkpoint.Scan(o.Folder)
	for _, e := range all {
		if !o.before[e.Name+" "+e.Manifest.ID] {
			step, found = e.Step, true
		}
	}
	return step, found
}

// Names lists all checkpoints in the folder by their names, without the cost of reading them.
func (o OwnCheckpoints) Names() (list []string) {
	found, _ := os.ReadDir(o.Folder)
	for _, f := range found {
		if strings.HasPrefix(f.Name(), "step-") {
			list = append(list, f.Name())
		}
	}
	return list
}

// Grew reports whether there is a checkpoint that is not in before. It is the job's, which has the
// folder to itself.
func (o OwnCheckpoints) Grew(before []string) bool {
	return slices.ContainsFunc(o.Names(), func(name string) bool { return !slices.Contains(before, name) })
}

// Resuming returns train's arguments for the next attempt.
func (o OwnCheckpoints) Resuming(args []string) []string {
	if !o.resumes() || slices.Contains(args, "--resume") {
		return args
	}
	return append(slices.Clone(args), "--resume")
}

// resumes reports whether the job continues from the folder, including its receipt. If the folder
// had no checkpoints, it does so even before the job has saved one.
func (o OwnCheckpoints) resumes() bool {
	_, found := o.Newest()
	return found || len(o.before) == 0
}

// From describes where a job that lost a rank continues.
func (o OwnCheckpoints) From() (where string, step int) {
	step, found := o.Newest()
	if !found {
		return "step 1", 0
	}
	return fmt.Sprintf("the checkpoint of step %d", step), step
}
