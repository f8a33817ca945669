package processes

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// A run's peak resident memory, as the kernel reports it, equals the peak of `spillway plan` within
// 5 % and 64 MiB. The peak is above 1 GiB and includes memory outside the arenas.
func TestResidentMemoryIsThePlans(t *testing.T) {
	t.Parallel()
	runs := long.Or(map[string]int{
		"--ranks 2 --recompute full --offload optimizer=host --tokenizer gpt2 --data ../../../../README.md --trace DIR/trace.json": 1,
	}, map[string]int{
		"--ranks 3 --recompute full --trace DIR/trace.json":                      2,
		"--offload optimizer=host --tokenizer gpt2 --data ../../../../README.md": 5,
		"--zero 0": 5,
		"--ranks 3 --zero 1 --offload optimizer=disk --disk DIR/disk": 1,
	})
	for flags, layers := range runs {
		// The first blocks of GPT-2 and its embeddings: 46 to 75 million parameters.
		model := edited(t, "gpt2", func(c map[string]any) {
			c["n_layer"], c["n_embd"], c["n_head"], c["vocab_size"] = layers, 768, 12, 50257
			delete(c, "n_inner")
		})
		args := strings.Fields("--model " + model + " --data " + testdata + "/text.bin --steps 1 --batch 1 --seq " + long.Or("8 ", "32 ") +
			strings.ReplaceAll(flags, "DIR", t.TempDir()))
		_, doc := planned(t, args...)
		metrics := filepath.Join(t.TempDir(), "m.jsonl")
		p := start(t, append([]string{"train", "--metrics", metrics}, args...)...)
		resident := mostResident(t, p.Process.Pid)
		require.Equal(t, 0, p.end(t), p.errs.String())
		q, ranks := doc.Requested, int64(doc.Ranks)
		require.Zero(t, q.Device.OutsideBytes, "the CPU's device memory has nothing outside")
		require.Positive(t, q.Host.OutsideBytes)
		arenas, outside := ranks*(q.Device.PeakBytes+q.Host.PeakBytes), ranks*q.Host.OutsideBytes
		for space, n := range map[string]int64{"device": q.Device.PeakBytes, "host": q.Host.PeakBytes, "disk": q.Disk.PeakBytes} {
			for _, ran := range readLines(t, metrics)[0][space+"_planned_bytes"].([]any) {
				require.EqualValues(t, n, ran, "%s: what ran is what was planned, %s", flags, space)
			}
		}
		require.Greater(t, arenas, int64(1<<30))
		over, mib := resident-arenas-outside, int64(1<<20)
		t.Logf("%s: arenas %d MiB, outside %d MiB, resident %d MiB", flags, arenas/mib, outside/mib, resident/mib)
		slack := (arenas+outside)/20 + 64*mib
		require.LessOrEqual(t, over, slack, flags)
		require.GreaterOrEqual(t, over, -slack, "%s: the arenas are really there", flags)
	}
}

// mostResident returns the peak resident bytes of a process, once it has ended. Its rusage is no
// alternative: it begins with the peak of its parent, whose memory a started process shares until
// it executes the program.
func mostResident(t *testing.T, pid int) (most int64) {
	t.Helper()
	for ; ; time.Sleep(time.Millisecond) {
		text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
		require.NoError(t, err)
		found := false
		for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
			if kib, ok := strings.CutPrefix(lines.Text(), "VmHWM:"); ok {
				n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(kib, "kB")), 10, 64)
				require.NoError(t, err)
				most, found = n*1024, true
			}
		}
		if !found {
			return most // it has ended and is not yet waited for
		}
	}
}
