package main

import (
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Promise 2 as the kernel sees it: what a run over 1 GiB has resident, at its
// most, is what `spillway plan` says of it with what is outside the arenas, to
// 5 % and 64 MiB.
func TestResidentMemoryIsThePlans(t *testing.T) {
	for flags, layers := range map[string]int{
		"--zero 0": 5,
		"--ranks 3 --recompute full --trace DIR/trace.json":                2,
		"--offload optimizer=host --tokenizer gpt2 --data ../../README.md": 5,
		"--ranks 3 --zero 1 --offload optimizer=disk --disk DIR/disk":      1,
	} {
		// The first blocks of GPT-2 and its embeddings: 46 to 75 million parameters.
		model := edited(t, "gpt2", func(c map[string]any) {
			c["n_layer"], c["n_embd"], c["n_head"], c["vocab_size"] = layers, 768, 12, 50257
			delete(c, "n_inner")
		})
		args := strings.Fields("--model " + model + " --data " + testdata + "/text.bin --steps 1 --batch 1 --seq 32 " + strings.ReplaceAll(flags, "DIR", t.TempDir()))
		_, doc := planned(t, args...)
		metrics := filepath.Join(t.TempDir(), "m.jsonl")
		// What a process has resident at its most begins with what its parent had when it
		// started it.
		debug.FreeOSMemory()
		p := start(t, append([]string{"train", "--metrics", metrics}, args...)...)
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
		resident := p.ProcessState.SysUsage().(*syscall.Rusage).Maxrss * 1024 // KiB on Linux
		over, mib := resident-arenas-outside, int64(1<<20)
		t.Logf("%s: arenas %d MiB, outside %d MiB, resident %d MiB", flags, arenas/mib, outside/mib, resident/mib)
		slack := (arenas+outside)/20 + 64*mib
		require.LessOrEqual(t, over, slack, flags)
		require.GreaterOrEqual(t, over, -slack, "%s: the arenas are really there", flags)
	}
}
