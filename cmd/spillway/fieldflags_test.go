package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
)

// withoutFlag are fields that texts of the library name and no flag sets.
var withoutFlag = []string{"Own", "Generate", "Inference"}

// changedBy sets a flag to another value and returns the fields that it changes.
func changedBy(t *testing.T, name string) (fields []string) {
	for _, value := range []string{"7", "0.5", "true", "bf16", "7s", "7%", "0:7", "host:7MiB", "elsewhere:7MiB", "r=7,alpha=7,targets=*", "elsewhere"} {
		var c spillway.Config
		var l options.Later
		fs := pflag.NewFlagSet("train", pflag.ContinueOnError)
		options.Train(fs, &c, &l)
		before := c
		if fs.Set(name, value) != nil {
			continue
		}
		a, b := reflect.ValueOf(before), reflect.ValueOf(c)
		for _, f := range reflect.VisibleFields(a.Type()) {
			if f.IsExported() && !f.Anonymous && f.Type.Kind() != reflect.Func && f.Name != "Own" && !reflect.DeepEqual(a.FieldByIndex(f.Index).Interface(), b.FieldByIndex(f.Index).Interface()) {
				fields = append(fields, f.Name)
			}
		}
		if fields != nil {
			return fields
		}
	}
	return nil
}

// The table has every flag that sets a field, with that field, and of Config's other fields only
// those that other commands bind.
func TestFieldsOfFlags(t *testing.T) {
	var c spillway.Config
	var l options.Later
	fs := pflag.NewFlagSet("train", pflag.ContinueOnError)
	options.Train(fs, &c, &l)
	seen := map[string]bool{"Config.GlobalBatch": true} // set through options.Later
	job := pflag.NewFlagSet("job", pflag.ContinueOnError)
	options.JobFlags(job, &spillway.Config{})
	job.VisitAll(func(f *pflag.Flag) { // flags of train only
		for _, v := range reflect.VisibleFields(reflect.TypeFor[spillway.Config]()) {
			if cli.FlagOf("Config."+v.Name) == f.Name {
				seen["Config."+v.Name] = true
			}
		}
	})
	fs.VisitAll(func(f *pflag.Flag) {
		fields := changedBy(t, f.Name)
		if len(fields) == 0 {
			return
		}
		seen["Config."+fields[0]] = true
		require.Equal(t, f.Name, cli.FlagOf("Config."+fields[0]), "of field %s", fields[0])
	})
	require.Greater(t, len(seen), 60)
	for _, f := range reflect.VisibleFields(reflect.TypeFor[spillway.Config]()) {
		if field := "Config." + f.Name; cli.FlagOf(field) != "" {
			require.True(t, seen[field], "no flag sets %s", field)
		}
	}
}

// Each field that a text of the library names exists, and has a flag or is in withoutFlag.
func TestFieldsInSentences(t *testing.T) {
	known := reflect.TypeFor[spillway.Config]()
	named := 0
	for _, pattern := range []string{"planner", "train", "train/job", "train/saving", "config", "plan", "search", "run", "calibration", "data", "cluster"} {
		files, err := filepath.Glob(filepath.Join("..", "..", pattern, "*.go"))
		require.NoError(t, err)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, name, nil, 0)
			require.NoError(t, err)
			ast.Inspect(file, func(n ast.Node) bool {
				lit, ok := n.(*ast.BasicLit)
				if !ok || lit.Kind != token.STRING {
					return true
				}
				for _, found := range cli.NamedField.FindAllStringSubmatch(strings.Trim(lit.Value, "\"`"), -1) {
					field, ok := strings.CutPrefix(found[2], "Config.")
					if found[2] == "Job.Own" { // no command sets it
						continue
					}
					if !ok {
						require.NotEmpty(t, cli.FlagOf(found[2]), "%s", set.Position(lit.Pos()))
						continue
					}
					named++
					_, exists := known.FieldByName(field)
					require.True(t, exists, "%s: Config has no %s", set.Position(lit.Pos()), field)
					if cli.FlagOf(found[2]) == "" {
						require.Contains(t, withoutFlag, field, "%s", set.Position(lit.Pos()))
					}
				}
				return true
			})
		}
	}
	require.Greater(t, named, 100)
}

func TestFlagged(t *testing.T) {
	for text, want := range map[string]string{
		"Config.Zero 4: stages are 0, 1, 2 and 3":              "--zero 4: stages are 0, 1, 2 and 3",
		"resume: other (Config.LR and Config.LRSchedule)":      "resume: other (--lr and --lr-schedule)",
		"Sampling.TopP 2, Hardware.Nodes 3":                    "--top-p 2, --nodes 3",
		"a.jsonl (no Options.TextField)":                       "a.jsonl (no --text-field)",
		`"Config.Zero" and a/Config.Zero and Config.Own.Model`: `"Config.Zero" and a/Config.Zero and Config.Own.Model`,
		"Config.Model is missing: give a preset's name or":     "--model is missing: give a preset's name (spillway plan --list-models; spillway-demo is small enough for any machine) or",
	} {
		require.Equal(t, want, cli.Flagged(text))
	}
}
