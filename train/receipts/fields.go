package receipts

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/receipt"
)

// OwnNames lists, for a receipt, the values that the program itself provides.
func OwnNames(c *config.Config) (list []string) {
	model, rule := c.Own.Names()
	for _, own := range []struct{ what, name string }{{"model", model}, {"rule", rule}} {
		if own.name != "" {
			list = append(list, own.what+" "+own.name)
		}
	}
	if c.Own.Data != nil {
		list = append(list, "data")
	}
	if c.Own.Schedule != nil {
		list = append(list, "schedule")
	}
	return list
}

// notResults are the fields of Config that do not affect the results of steps. They say where
// and how a run computes, which data it only evaluates on, and what it writes.
var notResults = strings.Fields(`Own Chat Receipts Epochs Threads Prefetch Inference EvalData EvalGlob EvalEvery EvalSteps Device DeviceMemory HostMemory
	Disk DiskMemory DiskTuning DiskCache FrozenCache RequirePinned CUDAGraphs Planned Warn Outside LocalRanks Target PerHost Recompute Offload
	Checkpoint CheckpointMark SaveEvery AsyncSave Keep Resume AcceptChanges Timeout Metrics Receipt ReceiptEvery Trace TensorBoard
	MetricsAddr Measure PeakFlops Generate Allow`)

// isResult tells whether results depend on a field of Config, so that a receipt records it.
func isResult(f reflect.StructField) bool {
	return f.IsExported() && !slices.Contains(notResults, f.Name)
}

// Fields returns the fields of Config on which results depend. Ranks and related fields
// are left out if they change nothing: with Reproducible only a step's rows matter. The ZeRO
// stage is left out if all stages give the same bits; otherwise it is the lowest stage that
// gives them.
func Fields(c *config.Config) (map[string]json.RawMessage, error) {
	d := *c
	leave := map[string]bool{}
	if d.Algorithm() != algo.Ring {
		leave["Collectives"] = true
	}
	if n := d.Slices(); n == 0 {
		leave["Tensor"], leave["TensorSlices"] = true, true
	} else if d.TensorSlices = n; strings.EqualFold(d.PrecisionName(), "fp32") {
		d.Ranks, leave["Tensor"] = d.DataRanks(), true // any number of ranks gives the same bits with these slices
	}
	stage, matters := d.StageOfBits()
	d.Zero, leave["Zero"] = stage, !matters
	if d.Reproducible {
		d.GlobalBatch = c.StepRows()
		leave["Accum"], leave["RankShares"] = true, true
		if leave["Ranks"] = leave["Tensor"]; !leave["Tensor"] {
			d.Ranks = d.Tensor // one group is enough to identify the bits at any number of ranks
		}
	}
	fields := map[string]json.RawMessage{}
	v := reflect.ValueOf(&d).Elem()
	for _, f := range reflect.VisibleFields(v.Type()) {
		if !isResult(f) || leave[f.Name] {
			continue
		}
		text, err := json.Marshal(v.FieldByIndex(f.Index).Interface())
		if err != nil {
			return nil, fmt.Errorf("the receipt of Config.%s: %w", f.Name, err)
		}
		fields[f.Name] = text
	}
	return fields, nil
}

// configOf returns the Config that a receipt records, with default placement.
func configOf(about *receipt.Run) (config.Config, error) {
	c := config.Default()
	v := reflect.ValueOf(&c).Elem()
	for name, text := range about.Config {
		f, known := v.Type().FieldByName(name)
		if !known || !isResult(f) {
			return c, fmt.Errorf("Config.%.80s is no field on which results depend; another version may have written it", name)
		}
		if err := json.Unmarshal(text, v.FieldByIndex(f.Index).Addr().Interface()); err != nil {
			return c, fmt.Errorf("the receipt's Config.%s: %w", name, err)
		}
	}
	return c, nil
}

// refuseOtherBits refuses changes of the receipt's Config that change bits.
func refuseOtherBits(was, now *config.Config) error {
	before, err := Fields(was)
	if err != nil {
		return err
	}
	after, err := Fields(now)
	if err != nil {
		return err
	}
	field, got, want := (&receipt.Run{Config: after}).FieldsDiffer(&receipt.Run{Config: before})
	switch {
	case field == "" && now.Reproducible && now.DataRanks() > now.LeastLeaves():
		return config.Refuse("Config.Ranks %d: the run has steps of %d micro-batches, and each rank needs one; give at most that many", now.Ranks, now.LeastLeaves())
	case field == "":
		return nil
	case field == "Zero" && was.ShardSize == 0:
		return config.Refuse("Config.Zero %d: without Config.Reproducible it decides bits, and the receipt's run had stage %d or %d; give one of these, or leave it out", now.Zero, was.Zero/2*2, was.Zero/2*2+1)
	}
	return config.RefuseField(field, "Config.%s %.80s: it decides bits, and the receipt's run had %.80s; leave it out", field, got, want)
}
