package saving

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// Record describes the run that wrote a checkpoint: Manifest.Run. A record of version 1 has only
// the optimizer.
type Record struct {
	Optimizer string            `json:"optimizer"`
	Model     string            `json:"model,omitempty"`    // name of a model that the program provides; others have a config.json
	Samples   int64             `json:"samples"`            // rows of the data seen before the next step
	Epochs    int               `json:"epochs,omitempty"`   // version of the shuffled order, see data.Epochs; 0: the first
	Data      *data.Fingerprint `json:"data,omitempty"`     // nil: version 1
	Settings  map[string]string `json:"settings,omitempty"` // by name, see Settings
	Trained   int               `json:"trained"`            // parameters that are not frozen
	Skipped   int               `json:"skipped,omitempty"`  // steps so far whose update was left out
	LossScale *Scale            `json:"loss_scale,omitempty"`
	Noise     []Moments         `json:"noise,omitempty"`
	Base      *Base             `json:"base,omitempty"` // of adapters
	// Arithmetic identifies the arithmetic that the steps' last bits depend on, see the function
	// Arithmetic; "": not recorded.
	Arithmetic string `json:"arithmetic,omitempty"`
	// Receipt is the path of the run's receipt, relative to the folder of checkpoints; "": none.
	Receipt string `json:"receipt,omitempty"`
	// TiedByStage says that the first and the last stage of a pipeline each summed the gradient of
	// a tied table. The bits differ from those of a run in which one rank sums it.
	TiedByStage bool `json:"tied_by_stage,omitempty"`
	// ReceiptHead is the hash of the receipt's last line; "": not recorded.
	ReceiptHead string `json:"receipt_head,omitempty"`
	// EvalDue says that the evaluation after the last step was canceled. A resumed run does it
	// first.
	EvalDue bool `json:"eval_due,omitempty"`
}

// ReceiptPath returns the path of the run's receipt for a checkpoint in folder; "" if there is
// none.
func (r *Record) ReceiptPath(folder string) string {
	path := filepath.FromSlash(r.Receipt)
	if path == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(folder, path)
}

// Settings returns the settings that decide the order of the data, of sums, and the update, by the
// names of settingFields. Settings about memory are left out: they change no bits.
func Settings(c *config.Config) map[string]string {
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	order := c.Order
	if order == "" {
		order = data.DefaultOrder(c.Data).String()
	}
	freeze := slices.Clone(c.Freeze)
	slices.Sort(freeze)
	s := map[string]string{
		"seed": strconv.FormatInt(c.Seed, 10), "order": strings.ToLower(order), "seq": strconv.Itoa(c.Seq), "tokenizer": c.Tokenizer,
		"batch": strconv.Itoa(c.Batch), "accum": strconv.Itoa(c.Accum), "ranks": strconv.Itoa(c.Ranks),
		"lr": number(c.LR), "lr-schedule": strings.ToLower(c.LRSchedule), "lr-scale": strings.ToLower(c.LRScale),
		"weight-decay": number(c.WeightDecay), "beta1": number(c.Beta1), "beta2": number(c.Beta2), "eps": number(c.Eps),
		"clip": number(c.Clip), "dropout": number(c.Dropout), "freeze": strings.Join(freeze, ","),
		"precision": strings.ToLower(c.PrecisionName()), "warmup": strconv.Itoa(c.Warmup), "min-lr": number(c.MinLR),
		"on-nonfinite": "stop",
	}
	if c.SkipsNonFinite() {
		s["on-nonfinite"] = "skip"
	}
	if s["lr-scale"] != "none" {
		s["lr-base-batch"] = strconv.Itoa(c.LRBaseBatch)
	}
	if l := s["lr-schedule"]; l == "linear" || l == "cosine" {
		maps.Copy(s, length(c))
	}
	if c.Own.Schedule != nil {
		s["lr-schedule"] = "the program's own"
		for _, name := range []string{"lr", "lr-scale", "lr-base-batch", "warmup", "min-lr", "steps", "epochs"} {
			delete(s, name)
		}
	}
	if c.UpdateRule().Reads(zero.Trust) {
		s["trust"] = number(c.Trust)
	}
	for name, on := range map[string]bool{"adapt-all": c.AdaptAll, "nesterov": c.Nesterov, "reproducible": c.Reproducible} {
		if on {
			s[name] = "true"
		}
	}
	if c.PortableBF16() {
		s["bf16-rounding"] = "portable"
	}
	if c.Reduce32() {
		s["reduce"] = "fp32"
	}
	if rows := c.StepRows(); len(c.BatchSchedule) > 0 {
		s["batch-schedule"] = c.BatchSchedule.String()
		delete(s, "accum")
	} else if rows != c.DataRanks()*c.Accum*c.Batch {
		s["global-batch"] = strconv.Itoa(rows)
	}
	if c.AsksLayers() && c.Accum > 1 {
		s["accum-order"] = config.LayerOrder
	}
	if c.ShardSize != 0 && c.ShardSize != c.DataRanks() {
		s["shard-size"] = strconv.Itoa(c.ShardSize)
	}
	for name, n := range map[string]int{"tensor": c.Tensor, "tensor-slices": c.Slices(), "pipeline": c.Pipeline} {
		if n > 1 {
			s[name] = strconv.Itoa(n)
		}
	}
	if c.Algorithm() == algo.Ring {
		s["collectives"] = string(algo.Ring)
	}
	if c.LoRA.Active() {
		s["lora"] = c.LoRA.String()
		if b := c.BaseType(); b.String() != "" && b.String() != s["precision"] {
			s["base"] = b.String()
		}
	}
	if len(c.Int8) > 0 {
		s["int8"] = strings.ToLower(strings.Join(slices.Sorted(slices.Values(c.Int8)), ","))
	}
	if e := c.EpiloguesChosen(); e != "" {
		s["epilogues"] = e
	}
	if c.BF16States() {
		s["optimizer-dtype"] = "bf16"
	}
	if c.LossScaleHysteresis > 1 {
		s["loss-scale-hysteresis"] = strconv.Itoa(c.LossScaleHysteresis)
	}
	if scale := strings.ToLower(c.LossScale); scale != "" && scale != config.DynamicScale {
		s["loss-scale"] = scale
	}
	return s
}

// length returns the run's length as settings: its epochs if they are configured, otherwise its
// steps. With epochs, a resumed run counts its steps again from its current sample.
func length(c *config.Config) map[string]string {
	if c.Epochs > 0 {
		return map[string]string{"epochs": strconv.Itoa(c.Epochs)}
	}
	return map[string]string{"steps": strconv.Itoa(c.Steps)}
}

// settingFields has the fields of Config by their names in checkpoints.
var settingFields = map[string]string{
	"accum": "Accum", "accum-order": "AccumOrder", "adapt-all": "AdaptAll", "base": "Base", "batch": "Batch", "batch-schedule": "BatchSchedule", "beta1": "Beta1",
	"beta2": "Beta2", "clip": "Clip", "collectives": "Collectives", "dropout": "Dropout", "epilogues": "Epilogues",
	"epochs": "Epochs", "eps": "Eps", "freeze": "Freeze", "global-batch": "GlobalBatch",
	"int8": "Int8", "lora": "LoRA", "loss-scale": "LossScale", "loss-scale-hysteresis": "LossScaleHysteresis", "lr": "LR",
	"lr-base-batch": "LRBaseBatch", "lr-scale": "LRScale", "lr-schedule": "LRSchedule", "min-lr": "MinLR", "nesterov": "Nesterov", "on-nonfinite": "OnNonFinite",
	"optimizer-dtype": "OptimizerDType", "order": "Order", "pipeline": "Pipeline", "precision": "Precision", "ranks": "Ranks",
	"reduce": "Reduce", "bf16-rounding": "BF16Rounding", "reproducible": "Reproducible", "seed": "Seed", "seq": "Seq",
	"shard-size": "ShardSize", "tensor": "Tensor", "tensor-slices": "TensorSlices", "steps": "Steps", "tokenizer": "Tokenizer", "trust": "Trust", "warmup": "Warmup",
	"weight-decay": "WeightDecay",
}

// Changed lists the settings that differ, by name, in order, as "Config.LR: 0.001 → 0.1".
func Changed(old, now map[string]string) (names, lines []string) {
	if r := old["reduce"]; r == "" || r == "same" { // earlier versions recorded the default too
		old = maps.Clone(old)
		delete(old, "reduce")
	}
	for name := range now {
		names = append(names, name)
	}
	for name := range old {
		if _, ok := now[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	show := func(s map[string]string, name string) string {
		v, ok := s[name]
		switch {
		case !ok && name == "loss-scale" && s["precision"] == "fp16":
			return config.DynamicScale // the default is not recorded
		case !ok:
			return "not in use"
		case v == "":
			return "none"
		}
		return fmt.Sprintf("%.80s", strings.Trim(strconv.Quote(v), `"`))
	}
	names = slices.DeleteFunc(names, func(name string) bool {
		a, had := old[name]
		b, has := now[name]
		return a == b && had == has
	})
	for _, name := range names {
		field := fmt.Sprintf("setting %.80q", name) // a setting of another version
		if f, ok := settingFields[name]; ok {
			field = "Config." + f
		}
		if name == "tensor-slices" { // may also come from Config.Tensor alone
			field = "slices of a layer, which decide the last bits"
		}
		lines = append(lines, fmt.Sprintf("%s: %s → %s", field, show(old, name), show(now, name)))
	}
	return names, lines
}

// Record describes the run for a checkpoint after s.at.Step steps.
func (s *Saver) Record() ([]byte, error) {
	print, trained := s.print, 0
	for i := range s.plan.Program.Tensors() {
		if !s.plan.Program.Params[i].Frozen {
			trained++
		}
	}
	r := Record{Optimizer: s.cfg.UpdateRule().Name, Model: s.ownName(), Samples: s.data.Sampler().Tell(s.at.Step), Epochs: s.data.Sampler().EpochsVersion(), Data: &print, Settings: Settings(&s.cfg.Config), Trained: trained,
		Skipped: s.at.Skipped, Noise: s.at.Noise, Arithmetic: s.arithmetic, Receipt: receiptFrom(&s.cfg.Config), ReceiptHead: s.at.Receipt, EvalDue: s.at.EvalDue}
	r.TiedByStage = s.tiedByStage()
	if s.cfg.LoRA.Active() {
		r.Base = &s.at.Base
	}
	if scaler := s.plan.Program.Scaler; scaler != nil && scaler.State != graph.NoBuf {
		r.LossScale = &s.at.Scale
	}
	return json.Marshal(r)
}

// tiedByStage returns Record.TiedByStage.
func (s *Saver) tiedByStage() bool {
	return slices.ContainsFunc(s.plan.Program.Params, func(q graph.Param) bool { return q.TiedTo != 0 && !q.Frozen })
}

// rowsUntil returns the batch schedule of the first steps of a run with the given settings; nil if
// they do not have it.
func rowsUntil(settings map[string]string, steps int) config.BatchSchedule {
	if text, ok := settings["batch-schedule"]; ok {
		s, _ := config.ParseBatchSchedule(text)
		return s.Until(steps)
	}
	rows, err := strconv.Atoi(settings["global-batch"])
	if err != nil {
		of := func(name string) int {
			n, _ := strconv.Atoi(settings[name])
			return n
		}
		rows = of("batch") * of("accum") * of("ranks") / max(of("tensor"), 1) / max(of("pipeline"), 1)
	}
	return config.BatchSchedule{{Step: 0, Rows: rows}}.Until(steps)
}

// refuseOtherRows refuses a batch schedule whose rows differ from those of the checkpoint's
// finished steps, unless Config.AcceptChanges.
func (s *Saver) refuseOtherRows(c checkpoint.Choice, was, now map[string]string) error {
	if s.cfg.AcceptChanges || s.replays || was["batch-schedule"] == now["batch-schedule"] {
		return nil
	}
	done := c.Manifest.Step
	had, has := rowsUntil(was, done), rowsUntil(now, done)
	if slices.Equal(had, has) {
		return nil
	}
	return config.RefuseField("AcceptChanges", "resume: the %d steps of %s had the rows of Config.BatchSchedule %.80s, and this run's would have had those of %.80s; give what they had, or Config.AcceptChanges to go on all the same", done, c.Name, had, has)
}

// otherRows returns a note if steps have other rows than before and the configuration did not ask
// for that; otherwise "".
func (s *Saver) otherRows(was, now map[string]string) string {
	c := &s.cfg.Config
	had, has := rowsUntil(was, 1), rowsUntil(now, 1)
	if c.GlobalBatch > 0 || was["batch-schedule"] != now["batch-schedule"] || had[0].Rows == has[0].Rows {
		return ""
	}
	text := fmt.Sprintf("rows of a step: %d → %d, and so the results", had[0].Rows, has[0].Rows)
	if had[0].Rows%(c.Batch*c.DataRanks()) == 0 {
		text += fmt.Sprintf("; Config.GlobalBatch %d keeps them", had[0].Rows)
	}
	return text
}

// receiptFrom returns the path of the receipt relative to the folder of checkpoints, or the path
// unchanged if there is no relative one.
func receiptFrom(c *config.Config) string {
	if c.Receipt == "" {
		return ""
	}
	folder, err := filepath.Abs(c.Checkpoint)
	file, ferr := filepath.Abs(c.Receipt)
	if err == nil && ferr == nil {
		if rel, err := filepath.Rel(folder, file); err == nil {
			return filepath.ToSlash(rel)
		}
	}
	return c.Receipt
}

// Seek moves the data to the sample at which the checkpoint's run stopped, and notes changed
// settings. Other data, another seed or another order are refused unless Config.AcceptChanges. So
// is another batch schedule for the finished steps.
func (s *Saver) Seek(c checkpoint.Choice, was Record) error {
	step := c.Manifest.Step
	if err := s.data.Sampler().UseEpochs(was.Epochs); err != nil {
		return fmt.Errorf("resume from %s: %w", c.Name, err)
	}
	if was.Data == nil {
		sample := s.data.Sampler().Tell(step)
		s.note("%s does not say which data, seed and order its run had (an older version of Spillway wrote it); it goes on at sample %d, %d steps of this run", c.Name, sample, step)
		return nil
	}
	had, now := was.Settings, Settings(&s.cfg.Config)
	if had, now = maps.Clone(had), maps.Clone(now); s.cfg.GlobalBatch > 0 { // the number of rows was configured: Config.Accum follows from it
		for _, settings := range []map[string]string{had, now} {
			if rows := rowsUntil(settings, 1); settings["batch-schedule"] == "" {
				settings["global-batch"] = strconv.Itoa(rows[0].Rows)
			}
			delete(settings, "accum")
		}
		if now["batch-schedule"] != "" {
			delete(had, "global-batch")
		}
	}
	names, lines := Changed(had, now)
	var moved []string // changes because of which the run would see other samples
	if *was.Data != s.print {
		unit := "tokens"
		if s.data.OwnSamples() {
			unit = "samples"
		}
		how := fmt.Sprintf("%d %s → %d %s", was.Data.Tokens, unit, s.print.Tokens, unit)
		if was.Data.Tokens == s.print.Tokens {
			how = fmt.Sprintf("as many %s, %d, but not the same", unit, s.print.Tokens)
		}
		moved = append(moved, "Config.Data is other data: "+how)
		lines = append(lines, "Config.Data: other data: "+how)
	}
	shuffled := Settings(&s.cfg.Config)["order"] == "shuffled"
	for i, name := range names {
		if name == "seed" || name == "order" || name == "seq" && shuffled {
			moved = append(moved, lines[i])
		}
	}
	if len(moved) > 0 && !s.cfg.AcceptChanges && !s.replays {
		return config.RefuseField("AcceptChanges", "resume: %s was made by a run on other samples: %s; give what it had, or Config.AcceptChanges to go on all the same", c.Name, strings.Join(moved, "; "))
	}
	if err := s.refuseOtherRows(c, was.Settings, Settings(&s.cfg.Config)); err != nil {
		return err
	}
	sample := was.Samples
	if seq, err := strconv.Atoi(was.Settings["seq"]); err == nil && seq > 0 && seq != s.cfg.Seq && !s.data.OwnSamples() {
		sample = s.data.Sampler().Translate(sample, seq)
	}
	if err := s.data.Sampler().Seek(step, sample); err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	for _, line := range lines {
		s.note("changed since %s: %s", c.Name, line)
	}
	if line := s.otherRows(had, now); line != "" {
		s.note("changed since %s: %s", c.Name, line)
	}
	then := s.cfg.Config
	then.Zero = c.Manifest.Zero
	before, _ := then.StageOfBits()
	if stage, _ := s.cfg.StageOfBits(); stage != before {
		s.note("changed since %s: Config.Zero: %d → %d, which adds gradients in another order "+
			"(Config.Reproducible: all stages have the same bits)", c.Name, then.Zero, s.cfg.Zero)
	}
	if by := s.tiedByStage(); by != was.TiedByStage {
		how := map[bool]string{false: "in one place", true: "by stage"}
		s.note("changed since %s: the gradient of the tied table is summed %s → %s (Config.Pipeline), "+
			"so the last bits are others than in a run that goes on as it was", c.Name, how[was.TiedByStage], how[by])
	}
	line, err := otherArithmetic(c.Name, was, s.arithmetic, &s.cfg.Config)
	if line != "" {
		s.note("%s", line)
	}
	return err
}

// refuseLoop refuses settings with which an attempt from this checkpoint became non-finite before.
// It would fail again, and a supervisor that restarts failed runs would never stop.
func (s *Saver) refuseLoop(c checkpoint.Choice) error {
	now := Settings(&s.cfg.Config)
	for _, d := range slices.Backward(s.store.Diverged()) {
		if names, _ := Changed(d.Settings, now); d.Step > c.Manifest.Step && len(names) == 0 {
			from := "the start"
			if c.Found() {
				from = c.Name
			}
			ways := "change Config.LR, Config.Warmup, Config.Clip, or Config.Seed with Config.AcceptChanges"
			if !s.cfg.SkipsNonFinite() {
				ways = "change Config.LR, Config.Warmup, Config.Clip, Config.Seed with Config.AcceptChanges, or give Config.OnNonFinite skip"
			}
			return fmt.Errorf("resume: with these settings the run became non-finite at step %d, and from %s it would again; %s", d.Step, from, ways)
		}
	}
	return nil
}

// MarkDivergence records that the run stops at a step (from 1) whose values are not
// finite.
func (s *Saver) MarkDivergence(step int) {
	_ = s.Settle(true) // its error matters less than the divergence
	s.Idle()
	if err := s.store.MarkDivergence(step, Settings(&s.cfg.Config)); err != nil {
		s.cfg.Warnf("%v", err)
	}
}

func (s *Saver) note(format string, args ...any) {
	s.notes = append(s.notes, fmt.Sprintf(format, args...))
}
