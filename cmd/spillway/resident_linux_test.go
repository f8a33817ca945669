package main

import (
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Promise 2 as the kernel sees it: what a run over 1 GiB has resident, at its
// most, is the plan's total and 64 MiB for everything else.
func TestResidentMemoryStaysByThePlan(t *testing.T) {
	metrics := filepath.Join(t.TempDir(), "m.jsonl")
	// 75 million parameters, 16 bytes each: the first 5 blocks of GPT-2.
	model := edited(t, "gpt2", func(c map[string]any) {
		c["n_layer"], c["n_embd"], c["n_head"], c["vocab_size"] = 5, 768, 12, 50257
		delete(c, "n_inner")
	})
	p := start(t, "train", "--model", model, "--data", testdata+"/text.bin", "--steps", "1", "--batch", "1", "--seq", "32", "--metrics", metrics)
	require.Equal(t, 0, p.end(t), p.errs.String())
	step := readLines(t, metrics)[0]
	var plan float64
	for _, space := range []string{"device", "host"} {
		for _, n := range step[space+"_planned_bytes"].([]any) {
			plan += n.(float64)
		}
	}
	require.Greater(t, plan, float64(1<<30))
	resident := float64(p.ProcessState.SysUsage().(*syscall.Rusage).Maxrss) * 1024 // KiB on Linux
	require.LessOrEqual(t, resident, plan+64<<20, "%.1f MiB over the plan of %.1f MiB", (resident-plan)/(1<<20), plan/(1<<20))
	require.Greater(t, resident, plan/2, "the arena is really there")
}
