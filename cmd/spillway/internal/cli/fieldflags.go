package cli

import (
	"regexp"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/planner"
)

// otherNames are the flags that are not named as their fields are.
var otherNames = map[string]string{
	"Config.LocalRanks": "ranks-per-process", "Config.LoRA": "lora", "Config.OnNonFinite": "on-nonfinite", "Config.OptimizerDType": "optimizer-dtype",
	"Config.TensorBoard": "tensorboard", "Hardware.Device": "gpu", "Hardware.Effort": "effort",
	"Hardware.HostShare": "node-memory", "Hardware.Nodes": "nodes",
	"Hardware.PerNode": "gpus-per-node", "Job.Outlives": "min-ranks", "Job.Transport": "transport", "Options.TextField": "text-field",
	"Sampling.Temperature": "temperature", "Sampling.TopK": "top-k", "Sampling.TopP": "top-p",
}

// wordStart is where a word of a field's name begins: LRBaseBatch is LR, Base, Batch.
var wordStart = regexp.MustCompile(`([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])`)

// FlagOf returns the flag of a field that the library's errors, warnings and reasons
// name, "" for none: the field's words in lower case where a group of flags has that.
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

// NamedField is a field in a sentence: a word by itself, which a path or a quoted value
// is not.
var NamedField = regexp.MustCompile(`(^|[\s(])((?:Config|Sampling|Hardware|Job|Options)\.[A-Z]\w*)`)

// ofAFlag matches how the planner begins when it refuses a pattern: with the pass's name, which
// is also the flag's.
var ofAFlag = regexp.MustCompile(`^(warning: )?plan: (freeze|lora|recompute|offload): `)

// passAfterFlag is the pass's name behind the flag that says it.
var passAfterFlag = regexp.MustCompile(`^(--(?:recompute|offload) \S+): (?:recompute|offload): `)

// mergeFirst is the library's remedy that a command carries out, and the checkpoint's folder.
var mergeFirst = regexp.MustCompile(`merge the adapters first of ('[^']*'|\S+)`)

// withoutModel is what the library says where a model is missing; the command has a list.
const withoutModel = "--model is missing: give a preset's name"

// Flagged is a text of the library with flags in place of fields.
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

// FlaggedAll is Flagged for lines of a report, which may hold paths.
func FlaggedAll(lines []string) []string {
	out := make([]string, len(lines))
	for i, line := range lines {
		out[i] = OnOneLine(Flagged(line))
	}
	return out
}

// Reasons are a plan's reasons as the command says them.
func Reasons(f *planner.Forecast) []string { return FlaggedAll(planner.Reasons(f)) }

// ArgsOf are settings as words of a command line.
func ArgsOf(settings planner.Settings) (args []string) {
	for _, s := range settings {
		args = append(args, "--"+FlagOf(s.Field))
		if s.Value != "true" { // a switch
			args = append(args, s.Value)
		}
	}
	return args
}

// FlagText is settings as a person types them.
func FlagText(settings planner.Settings) string { return planner.Shell(ArgsOf(settings)) }
