package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWeightsAreASafetensorsFile(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, tinyShape.write(dir, 1))
	b, err := os.ReadFile(filepath.Join(dir, "model.safetensors"))
	require.NoError(t, err)
	size := binary.LittleEndian.Uint64(b)
	var head map[string]struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets []int  `json:"data_offsets"`
	}
	require.NoError(t, json.Unmarshal(b[8:8+size], &head))
	require.Len(t, head, 4+12*tinyShape.layers)
	data, end := b[8+size:], 0
	for name, h := range head {
		n := 1
		for _, d := range h.Shape {
			n *= d
		}
		require.Equal(t, "F32", h.DType)
		require.Equal(t, 4*n, h.Offsets[1]-h.Offsets[0], name)
		end = max(end, h.Offsets[1])
	}
	require.Len(t, data, end)
	gain := math.Float32frombits(binary.LittleEndian.Uint32(data[head["ln_f.weight"].Offsets[0]:]))
	require.InDelta(t, 1, gain, 0.2)
	again := t.TempDir()
	require.NoError(t, tinyShape.write(again, 1))
	c, err := os.ReadFile(filepath.Join(again, "model.safetensors"))
	require.NoError(t, err)
	require.Equal(t, b, c, "a seed's weights are the same")
}

func losses(v ...float64) (s []step) {
	for _, l := range v {
		s = append(s, step{Loss: l})
	}
	return s
}

func TestLossesAreCompared(t *testing.T) {
	worst, ok := compareLosses(losses(2, 4), losses(2, 4.0002))
	require.True(t, ok)
	require.InDelta(t, 5e-5, worst, 1e-7)
	_, ok = compareLosses(losses(2, 4), losses(2, 4.001))
	require.False(t, ok)
	_, ok = compareLosses(losses(2, math.NaN()), losses(2, 4))
	require.False(t, ok, "NaN")
	_, ok = compareLosses(losses(2), losses(2, 4))
	require.False(t, ok, "a step is missing")
}

func TestBitsAndPeaksAreCompared(t *testing.T) {
	a := &training{steps: losses(1, 2), params: "x"}
	require.True(t, sameBits(a, &training{steps: losses(1, 2), params: "x"}))
	require.False(t, sameBits(a, &training{steps: losses(1, 2.0000000001), params: "x"}))
	require.False(t, sameBits(a, &training{steps: losses(1, 2), params: "y"}))
	require.False(t, sameBits(&training{steps: losses(1)}, &training{steps: losses(1)}), "no hash")
	a.steps[1].DevicePeak, a.steps[1].DevicePlanned = []int64{5, 6}, []int64{5, 7}
	require.Equal(t, "device memory: touched [5 6], planned [5 7]", a.peaks())
}

func TestBreakdownTable(t *testing.T) {
	table, say := kernelTable([]byte(`{"kernel":"adamw","launches":15,"us":1500}
{"kernel":"flash_forward_bf16","launches":12,"us":4500}
{"kernel":"late","launches":2,"error":"two layers do not have it: not timed"}
`), 0.0075)
	require.Equal(t, []string{"flash_forward_bf16", "12", "4.50", "375.0", "75.0 %"}, table[1])
	require.Len(t, table, 3)
	require.Equal(t, []string{"breakdown, late: two layers do not have it: not timed",
		"bf16, by kernel, each launch alone between events: 6.00 ms a step, of the step's 7.50 ms"}, say)
	_, say = kernelTable([]byte("what?\n"), 1)
	require.Equal(t, []string{"no breakdown: no kernel was timed"}, say)
}

func TestSpeedTable(t *testing.T) {
	rows := speedTable([]timing{{Side: "Spillway", Precision: "fp32", Seconds: 0.1, Tokens: 40960}, {Side: "PyTorch eager", Precision: "fp32", Seconds: 0.25, Tokens: 16384}, {Side: "PyTorch compiled", Precision: "fp32", Error: "no"}})
	require.Equal(t, []string{"PyTorch eager", "fp32", "250.00", "16384", "2.50"}, rows[2])
	require.Equal(t, []string{"PyTorch compiled", "fp32", "no", "", ""}, rows[3])
}

// Without what it needs the page says so, at once.
func TestPageSaysWhatIsMissing(t *testing.T) {
	out := t.TempDir()
	code, err := check(context.Background(), &bundle{out: out, device: "cuda"}, "")
	require.Equal(t, 1, code)
	require.ErrorContains(t, err, "the bundle is not whole")
	page, err := os.ReadFile(filepath.Join(out, "results.md"))
	require.NoError(t, err)
	require.Contains(t, string(page), "Nothing was run: the bundle is not whole")
	var d document
	text, err := os.ReadFile(filepath.Join(out, "results.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &d))
	require.NotEmpty(t, d.Missing)
}

func TestPage(t *testing.T) {
	d := &document{Started: "now", Device: "cuda", Machine: []fact{{"GPU 0", "H"}}, Parts: []*result{{Title: "Losses", Status: passed, Seconds: 3, Lines: []string{"fine"}, Table: [][]string{{"a", "b"}, {"1", "2"}}}}}
	require.Equal(t, "# Spillway on a GPU\n\nStarted now.\n\n- GPU 0: H\n\n| part | | seconds |\n| --- | --- | --- |\n| Losses | passed | 3 |\n"+
		"\n## Losses\n\n- fine\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n", d.markdown())
}
