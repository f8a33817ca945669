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
	fits := map[string]*Fit{}
	for i, r := range rows {
		_, err := gpus.Lookup(r.Card)
		require.NoError(t, err, "row %d", i+1)
		require.NotEmpty(t, r.Source, "row %d", i+1)
		require.Contains(t, Stacks, r.Stack, "row %d", i+1)
		require.Zero(t, r.Ranks%r.Node, "row %d: whole servers", i+1)
		if r.Seq <= 16384 { // predictions for attention over longer rows are less accurate
			require.True(t, r.Ratio() > 0.5 && r.Ratio() < 2.5, "row %d: %.2f: a slip of the pen, or of the planner", i+1, r.Ratio())
		}
		key := r.Stack + " " + r.Card
		if fits[key] == nil {
			fits[key] = FitOf(r.Stack, r.Card, gpus.Generation)
		}
		fitted := fits[key].Scale(r.Here.Parts)
		require.True(t, r.Ratio() > 0.5*fitted && r.Ratio() < 2*fitted, "row %d: %.2f times the calibrated time", i+1, r.Ratio()/fitted)
		if r.Calibration {
			calibration++
		} else {
			held++
		}
	}
	require.GreaterOrEqual(t, calibration, 40)
	require.GreaterOrEqual(t, held, 40)
}

// Ranges do not depend on held-out rows.
func TestRangesAreOfCalibrationRowsAlone(t *testing.T) {
	p := Parts{Products: 0.8, Attention: 0.1, Other: 0.05}
	on := func(card string) Range { return RangeOf(FitsOf(card, gpus.Generation), p) }
	rows := append([]Row(nil), Rows()...)
	for i := range rows {
		if !rows[i].Calibration {
			rows[i].Here.TokensPerS = 1e9
		}
	}
	for _, g := range gpus.List() {
		want := on(g.Name)
		require.Positive(t, want.Rows, g.Name)
		require.Less(t, want.Low, want.High, g.Name)
		require.Equal(t, want, RangeOf(FitsIn(rows, g.Name, gpus.Generation), p), g.Name)
	}
	h100, volta := on("h100-80"), on("v100-32")
	require.False(t, h100.Elsewhere)
	require.Contains(t, h100.Stacks, "llmq")
	require.Equal(t, on("h200-141"), h100, "the same generation")
	require.True(t, volta.Elsewhere)
	require.Contains(t, volta.Text(), "no published run of this generation")
	require.Less(t, volta.Low, volta.High)
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
