package published

import (
	"encoding/csv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/gpus"
)

func TestRowsAreWhole(t *testing.T) {
	rows := Rows()
	require.GreaterOrEqual(t, len(rows), 40)
	calibration, held := 0, 0
	for i, r := range rows {
		_, err := gpus.Lookup(r.Card)
		require.NoError(t, err, "row %d", i+1)
		require.NotEmpty(t, r.Source, "row %d", i+1)
		require.Contains(t, Stacks, r.Stack, "row %d", i+1)
		require.Zero(t, r.Ranks%r.Node, "row %d: whole servers", i+1)
		require.True(t, r.Ratio() > 0.5 && r.Ratio() < 2.5, "row %d: %.2f: a slip of the pen, or of the planner", i+1, r.Ratio())
		if r.Calibration {
			calibration++
		} else {
			held++
		}
	}
	require.GreaterOrEqual(t, calibration, 40)
	require.GreaterOrEqual(t, held, 40)
}

// No held-out row has a part in a range.
func TestRangesAreOfCalibrationRowsAlone(t *testing.T) {
	rows := append([]Row(nil), Rows()...)
	for _, g := range gpus.List() {
		want := RangeOf(g.Name, gpus.Generation)
		require.Positive(t, want.Rows, g.Name)
		require.Less(t, want.Low, want.High, g.Name)
		for i := range rows {
			if !rows[i].Calibration {
				rows[i].Here.TokensPerS = 1e9
			}
		}
		require.Equal(t, want, RangeIn(rows, g.Name, gpus.Generation), g.Name)
	}
	h100, volta := RangeOf("h100-80", gpus.Generation), RangeOf("v100-32", gpus.Generation)
	require.False(t, h100.Elsewhere)
	require.Contains(t, h100.Stacks, "llmq")
	require.Equal(t, RangeOf("h200-141", gpus.Generation), h100, "the same generation")
	require.True(t, volta.Elsewhere)
	require.Contains(t, volta.Text(), "no published run of this generation")
	require.LessOrEqual(t, volta.Low, h100.Low)
	require.GreaterOrEqual(t, volta.High, h100.High)
}

func TestParseRefuses(t *testing.T) {
	good, err := csv.NewReader(strings.NewReader(rowsCSV)).ReadAll()
	require.NoError(t, err)
	good = good[:2]
	change := func(column int, text string) [][]string {
		row := append([]string(nil), good[1]...)
		row[column] = text
		return [][]string{good[0], row}
	}
	for _, c := range []struct {
		records   [][]string
		predicted string
		want      string
	}{
		{good[1:], "1 1 1 1 0 0", "the columns have to be role, stack"},
		{good, "1 1 1 1 0 0\n1 1 1 1 0 0", "1 rows and 2 predictions"},
		{good, "x", `prediction 1 is "x"`},
		{change(0, "both"), "1 1 1 1 0 0", `line 2: the role "both"`},
		{change(5, ""), "1 1 1 1 0 0", `line 2: ranks "" is not a number`},
		{change(18, "0"), "1 1 1 1 0 0", `line 2: "0" tokens a second`},
		{change(19, "-1"), "1 1 1 1 0 0", `line 2: device_bytes "-1" is not a positive number`},
		{good, "1 1", `prediction 1 is "1 1"`},
	} {
		_, err := Parse(c.records, c.predicted)
		require.ErrorContains(t, err, c.want)
	}
	_, err = Parse(good, "1 1 1 1 0 0")
	require.NoError(t, err)
}

func TestPublishedMemory(t *testing.T) {
	device, host := DeviceMemory(Torch, Compiled), HostMemory(DeepSpeed)
	require.GreaterOrEqual(t, device.N, 4)
	require.True(t, 1 < device.Low && device.Low <= device.High && device.High < 2, "%+v", device)
	require.Positive(t, host.N)
	require.Greater(t, host.Low, 1.0)
	require.Contains(t, device.Text(), " times as much in 4 published runs")
	require.Zero(t, DeviceMemory("nobody's").N)
}
