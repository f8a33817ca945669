package cli

import (
	"regexp"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/planner"
)

// otherNames maps fields to flags whose names do not follow from the fields' names.
var otherNames = map[string]string{
	"Config.LocalRanks": "ranks-per-process", "Config.LoRA": "lora", "Config.OnNonFinite": "on-nonfinite", "Config.OptimizerDType": "optimizer-dtype",
	"Config.TensorBoard": "tensorboard", "Hardware.Device": "gpu", "Hardware.Effort": "effort",
	"Hardware.HostShare": "node-memory", "Hardware.Nodes": "nodes",
	"Hardware.PerNode": "gpus-per-node", "Job.Outlives": "min-ranks", "Job.Transport": "transport", "Options.TextField": "text-field",
	"Sampling.Temperature": "temperature", "Sampling.TopK": "top-k", "Sampling.TopP": "top-p",
}

// wordStart matches the start of a word in a field's name: LRBaseBatch is LR, Base, Batch.
var wordStart = regexp.MustCompile(`([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])`)

// FlagOf returns the flag of a field that the library's messages name, or "" if there is none: the
// field's words in lower case if flagGroups has such a flag.
func FlagOf(field string) string {
	if name, ok := otherNames[field]; ok {
		return name
	}
	name, ok := strings.CutPrefix(field, "Config.")
	name = strings.ToLower(wordStart.ReplaceAllString(name, "$1$3-$2$4"))
	if ok && slices.ContainsFunc(flagGroups, func(g flagGroup) bool { return slices.Contains(g.flags, name) }) {
		return name
	}
	return ""
}

// NamedField matches a field's name in a sentence as a separate word, not within a path or a quoted
// value.
var NamedField = regexp.MustCompile(`(^|[\s(])((?:Config|Sampling|Hardware|Job|Options)\.[A-Z]\w*)`)

// ofAFlag matches the start of a planner's error about a pattern: the name of the pass, which is
// also the flag's.
var ofAFlag = regexp.MustCompile(`^(warning: )?plan: (freeze|lora|recompute|offload): `)

// passAfterFlag matches the name of the pass after the flag of the same name.
var passAfterFlag = regexp.MustCompile(`^(--(?:recompute|offload) \S+): (?:recompute|offload): `)

// mergeFirst matches the library's advice to merge adapters first, with the checkpoint's folder.
var mergeFirst = regexp.MustCompile(`merge the adapters first of ('[^']*'|\S+)`)

// withoutModel is the library's text for a missing model; Flagged adds how to list the models.
const withoutModel = "--model is missing: give a preset's name"

// Flagged replaces the names of fields in a text of the library by flags.
func Flagged(text string) string {
	text = NamedField.ReplaceAllStringFunc(text, func(found string) string {
		at := strings.IndexAny(found, "CHJOS")
		if flag := FlagOf(found[at:]); flag != "" {
			return found[:at] + "--" + flag
		}
		return found
	})
	text = ofAFlag.ReplaceAllString(text, "$1--$2: ")
	text = passAfterFlag.ReplaceAllString(text, "$1: ")
	text = mergeFirst.ReplaceAllString(text, "merge the adapters first: spillway ckpt export $1 --merge --to DIR")
	return strings.Replace(text, withoutModel, withoutModel+" (spillway plan --list-models; spillway-demo is small enough for any machine)", 1)
}

// FlaggedAll applies Flagged to the lines of a report, which may contain paths.
func FlaggedAll(lines []string) []string {
	out := make([]string, len(lines))
	for i, line := range lines {
		out[i] = OnOneLine(Flagged(line))
	}
	return out
}

// Reasons returns a plan's reasons with flags in place of fields.
func Reasons(f *planner.Forecast) []string { return FlaggedAll(planner.Reasons(f)) }

// ArgsOf returns settings as words of a command line.
func ArgsOf(settings planner.Settings) (args []string) {
	for _, s := range settings {
		args = append(args, "--"+FlagOf(s.Field))
		if s.Value != "true" { // a switch
			args = append(args, s.Value)
		}
	}
	return args
}

// FlagText returns settings as a person types them in a shell.
func FlagText(settings planner.Settings) string { return planner.Shell(ArgsOf(settings)) }
