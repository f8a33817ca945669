package processes

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
)

// capFlags caps every space at exactly the plan's size, and one space at less bytes below it.
func capFlags(doc planning.Doc, disk string, space string, less int64) []string {
	need := func(name string, s planning.Space) string {
		n := s.PeakBytes + s.OutsideBytes
		if name == space {
			n -= less
		}
		return fmt.Sprint(n)
	}
	q := doc.Requested
	flags := []string{"--device-memory", need("device", q.Device), "--host-memory", need("host", q.Host)}
	if q.Disk.PeakBytes > 0 {
		flags = append(flags, "--disk", disk+":"+need("disk", q.Disk))
	}
	return flags
}

// A run that fits initialises, loads, trains, evaluates, saves and resumes within the same caps, to
// the byte. With a byte less of any space it is refused before it starts. After each phase the
// touched memory equals the plan.
func TestARunThatFitsAlsoResumes(t *testing.T) {
	t.Parallel()
	for i, offload := range []string{"", "optimizer=disk,parameters=host,gradients=disk,activations=host"} {
		dir := t.TempDir()
		disk, folder, metrics := filepath.Join(dir, "disk"), filepath.Join(dir, "checkpoint"), filepath.Join(dir, "m.jsonl")
		shape := []string{"--model", testdata + "/gpt2", "--batch", "1", "--seq", "16", "--ranks", "2", "--clip", "1", "--zero", fmt.Sprint(3 - i),
			"--data", testdata + "/text.bin", "--eval-data", testdata + "/text.bin", "--eval-steps", "1"}
		if offload != "" {
			shape = append(shape, "--offload", offload, "--disk", disk, "--recompute", "full")
		}
		_, doc := planned(t, shape...)
		require.Equal(t, offload != "", doc.Requested.Disk.PeakBytes > 0)
		caps := slices.Concat(shape, capFlags(doc, disk, "", 0))
		full := slices.Concat(caps, []string{"--metrics", metrics, "--checkpoint", folder, "--save-every", "1", "--resume"})
		touched := func() {
			for _, line := range readLines(t, metrics) {
				for _, space := range []string{"device", "host", "disk"} {
					require.Equal(t, line[space+"_planned_bytes"], line[space+"_peak_bytes"], "%s: %v", space, line)
				}
			}
		}
		p := start(t, slices.Concat([]string{"train"}, full, []string{"--steps", "1000000"})...)
		waitFor(t, "checkpoint", func() bool {
			names, err := filepath.Glob(filepath.Join(folder, "step-*"))
			return err == nil && len(names) > 0
		})
		require.NoError(t, p.Process.Signal(syscall.SIGKILL))
		require.Equal(t, -1, p.end(t))
		step, from := newest(t, folder)
		r := command(slices.Concat([]string{"train"}, full, []string{"--steps", fmt.Sprint(step + 2)})...)
		require.Equal(t, cli.ExitDone, r.status, r.stderr)
		touched()
		r = command(slices.Concat([]string{"train"}, caps, []string{"--metrics", metrics, "--init", from, "--steps", "2"})...)
		require.Equal(t, cli.ExitDone, r.status, r.stderr)
		touched()
		for _, space := range []string{"device", "host", "disk"} {
			if space == "disk" && offload == "" {
				continue
			}
			less := slices.Concat(shape, capFlags(doc, disk, space, 1))
			r := command(slices.Concat([]string{"train"}, less, []string{"--checkpoint", folder, "--resume", "--steps", "1000"})...)
			require.Equal(t, cli.ExitDoesNotFit, r.status, r.stderr)
			require.Contains(t, r.stderr, "of "+space+" memory")
			first, _, _ := strings.Cut(r.stderr, "\n")
			require.Contains(t, first, "(1 byte over)")
		}
	}
}
