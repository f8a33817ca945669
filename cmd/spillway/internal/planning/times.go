package planning

import (
	"fmt"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/published"
	"github.com/spillway-ml/spillway/planner"
)

// timeRange returns how published runs on the GPU compare with a plan's predicted time; with
// --stack the runs of that stack. It returns nil without --gpu.
func (f *Flags) timeRange(p *planner.Forecast) *published.Range {
	if f.gpuFound == nil {
		return nil
	}
	r := published.RangeOf(f.fits, published.PartsOf(p.Step.Seconds, p.Step.Exposed, p.Step.Products, p.Step.Attention))
	return &r
}

// seconds formats a predicted time of a plan; on a GPU as a range.
func (f *Flags) seconds(p *planner.Forecast, v float64) string {
	r := f.timeRange(p)
	if r == nil {
		return seconds(v)
	}
	return between(roughSeconds(r.Low*v), roughSeconds(r.High*v))
}

// step formats a plan's predicted time of a step.
func (f *Flags) step(p *planner.Forecast) string { return f.seconds(p, p.Step.Seconds) }

// speed formats a plan's predicted tokens a second, on a GPU as a range.
func (f *Flags) speed(p *planner.Forecast) string {
	v, r := p.TokensPerSecond(), f.timeRange(p)
	if r == nil {
		return cli.Count(v) + " tokens/s"
	}
	low, high := rough(v/r.High), rough(v/r.Low)
	if high < 1e6 {
		return between(grouped(int64(low)), grouped(int64(high))) + " tokens/s"
	}
	return between(millions(low), millions(high)) + " M tokens/s"
}

// elsewhere estimates the memory of the same job in other software, from published runs; "" without
// a GPU.
func (f *Flags) elsewhere(asked *planner.Forecast) string {
	if f.gpuFound == nil {
		return ""
	}
	here := "does not fit here"
	if asked.Fits {
		here = "fits here"
	}
	device := asked.Plan.Layout.Spaces[graph.Device].Peak + asked.Plan.Config.Outside[graph.Device]
	fsdp := published.DeviceMemory(published.Torch, published.Compiled)
	text := fmt.Sprintf("The job %s, with Spillway's plan. PyTorch FSDP took %s; by that the job needs %s of a GPU "+
		"there", here, fsdp.Text(), scaled(fsdp, device))
	switch capacity := asked.Plan.Config.Capacity[graph.Device]; {
	case float64(device)*fsdp.Low > float64(capacity):
		text += " and does not fit"
	case float64(device)*fsdp.High > float64(capacity):
		text += " and may not fit"
	}
	if asked.Plan.Layout.Spaces[graph.Host].Peak > 1<<30 {
		ds := published.HostMemory(published.DeepSpeed)
		text += fmt.Sprintf("; DeepSpeed's offload took %s of a server's memory, here %s", ds.Text(),
			scaled(ds, f.onServer(asked, graph.Host)))
	}
	return text + "."
}
