package planning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/pmezard/go-difflib/difflib"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/planner"
)

// dumpContext is the number of context lines around a difference.
const dumpContext = 2

// checkDump rejects a folder that is not empty: its files could not be told from those of a dump.
func checkDump(dir string) error {
	list, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("--dump: %w", err)
	case len(list) > 0:
		return fmt.Errorf("--dump: %s is not empty; name a new folder", dir)
	}
	return nil
}

// dumpPasses writes the model's program and the program after each pass to NN-PASS.txt, in the text
// form of package graph, and the difference from the previous one to NN-PASS.diff.
func dumpPasses(ctx context.Context, q planner.Request, dir string) error {
	if err := checkDump(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("--dump: %w", err)
	}
	before, last, n := "", "", 0
	err := q.Passes(ctx, func(pass string, p *graph.Program) error {
		name := filepath.Join(dir, fmt.Sprintf("%02d-%s", n, pass))
		text := graph.Format(p)
		err := os.WriteFile(name+".txt", []byte(text), 0o644)
		if err == nil && n > 0 {
			var diff string
			diff, err = difflib.GetUnifiedDiffString(difflib.UnifiedDiff{
				A: difflib.SplitLines(before), B: difflib.SplitLines(text),
				FromFile: last, ToFile: pass, Context: dumpContext})
			err = cmp.Or(err, os.WriteFile(name+".diff", []byte(diff), 0o644))
		}
		before, last, n = text, pass, n+1
		return err
	})
	if err != nil {
		return fmt.Errorf("--dump: %w", err)
	}
	return nil
}
