package planning

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
)

func listModels(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "model\tlayers\twidth\theads\tvocabulary\tpositions\tsource")
	for _, p := range model.Presets() {
		c := p.Config
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d\t%d\t%d\t%s\n", p.Name, c.Layers, c.Width, c.Heads, c.Vocab, c.Positions,
			p.Source)
	}
	return tw.Flush()
}

func listGPUs(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	rate := func(v float64) string {
		if v == 0 {
			return "–"
		}
		return fmt.Sprintf("%g", v/1e12)
	}
	fmt.Fprintln(tw, "GPU\tmemory\toutside*\tfp32\ttf32\tfp16\tbf16\tint8\tfp8\t"+
		"memory GB/s\tNVLink\tPCIe\tnetwork\tsource")
	for _, g := range gpus.List() {
		r := g.Rates
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%g\t%g\t%g\t%g\t%s\n",
			g.Name, plan.Bytes(g.Memory), plan.Bytes(g.OutsideBytes()),
			rate(r.FP32), rate(r.TF32), rate(r.FP16), rate(r.BF16), rate(r.INT8), rate(r.FP8),
			g.MemoryBandwidth/1e9, g.NVLink/1e9, g.PCIe/1e9, g.Network/1e9, g.Source)
	}
	fmt.Fprintln(tw, "\nRates: dense matrix products, TFLOP/s. Links: GB/s of one GPU in one direction.")
	fmt.Fprintln(tw, "* context and libraries of a process: an estimate by generation until it is measured.")
	return tw.Flush()
}
