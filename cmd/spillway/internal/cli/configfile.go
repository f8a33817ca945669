package cli

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/internal/regular"
)

// Limits of a configuration file. The parser's time and memory grow with the square of the depth,
// so the limits are checked before parsing.
const (
	maxConfig      = 1 << 20 // bytes
	maxConfigDepth = 100
)

// shallow rejects text whose brackets, indents or list marks nest deeper than maxConfigDepth. It
// does not know quotes, so brackets within values count too.
func shallow(text []byte) error {
	depth := 0
	for i, line := range bytes.Split(text, []byte("\n")) {
		deep := len(line) - len(bytes.TrimLeft(line, " \t-?"))
		for _, c := range line {
			switch c {
			case '[', '{':
				depth++
				deep = max(deep, depth)
			case ']', '}':
				depth = max(0, depth-1)
			}
		}
		if deep > maxConfigDepth {
			return fmt.Errorf("line %d nests deeper than %d levels", i+1, maxConfigDepth)
		}
	}
	return nil
}

// badValue matches pflag's error for a flag's value that does not parse.
var badValue = regexp.MustCompile(`^invalid argument ("(?:[^"\\]|\\.)*") for "(?:-., )?--(.+?)" flag: (.*)$`)

// PlainFlagError rewords an error of the flag parser, which otherwise names Go functions.
func PlainFlagError(err error) error {
	m := badValue.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	reason := m[3]
	switch {
	case strings.HasPrefix(reason, "strconv.ParseFloat"):
		reason = "a number is needed"
	case strings.HasPrefix(reason, "strconv.ParseInt"):
		reason = "a whole number is needed"
	case strings.HasPrefix(reason, "strconv.ParseBool"):
		reason = "true or false is needed"
	case strings.HasPrefix(reason, "time: "):
		reason = "a duration is needed, such as 60s or 2m"
	case strings.HasPrefix(reason, m[1]): // our own parsers quote the value
		return fmt.Errorf("--%s: %s", m[2], reason)
	}
	return fmt.Errorf("--%s %s: %s", m[2], m[1], reason)
}

// yamlPosition matches the position in the YAML parser's errors: "[line:column] message".
var yamlPosition = regexp.MustCompile(`^\[(\d+):\d+\] (.*)$`)

// ApplyConfigFile sets the flags that a YAML file gives and the command line does not. Errors name
// the file and the line.
func ApplyConfigFile(fs *pflag.FlagSet, path string) error {
	text, err := regular.ReadFile(path, maxConfig)
	if err == nil {
		err = shallow(text)
	}
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	return ApplyConfig(fs, path, text)
}

// ApplyConfig does the same as ApplyConfigFile with the text of the file.
func ApplyConfig(fs *pflag.FlagSet, path string, text []byte) error {
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		first, _, _ := strings.Cut(err.Error(), "\n")
		if m := yamlPosition.FindStringSubmatch(first); m != nil {
			return fmt.Errorf("--config %s:%s: not YAML: %s", path, m[1], m[2])
		}
		return fmt.Errorf("--config %s: not YAML: %s", path, first)
	}
	given := map[string]bool{}
	fs.Visit(func(f *pflag.Flag) { given[f.Name] = true })
	seen := map[string]int{}
	for _, doc := range file.Docs {
		if doc.Body == nil {
			continue
		}
		var pairs []*ast.MappingValueNode
		switch body := doc.Body.(type) {
		case *ast.MappingNode:
			pairs = body.Values
		case *ast.MappingValueNode:
			pairs = []*ast.MappingValueNode{body}
		case *ast.CommentGroupNode, *ast.NullNode:
			continue
		default:
			return fmt.Errorf("--config %s:%d: a mapping of flag names to values is needed", path, doc.Body.GetToken().Position.Line)
		}
		for _, pair := range pairs {
			if err := applyPair(fs, path, pair, given, seen); err != nil {
				return err
			}
		}
	}
	return nil
}

func applyPair(fs *pflag.FlagSet, path string, pair *ast.MappingValueNode, given map[string]bool, seen map[string]int) error {
	token := pair.Key.GetToken()
	line, key := token.Position.Line, token.Value
	at := fmt.Sprintf("--config %s:%d", path, line)
	if first, twice := seen[key]; twice {
		return fmt.Errorf("%s: %.80q is given twice (first in line %d)", at, key, first)
	}
	seen[key] = line
	flag := fs.Lookup(key)
	if flag == nil || key == "config" || key == "help" {
		if near := nearestFlag(fs, key); near != "" && near != key {
			return fmt.Errorf("%s: unknown key %.80q; did you mean %s?", at, key, near)
		}
		return fmt.Errorf("%s: unknown key %.80q; keys are the flags of this command without the dashes", at, key)
	}
	value, err := scalarText(pair.Value)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", at, key, err)
	}
	if given[key] {
		return nil
	}
	if err := fs.Set(key, value); err != nil {
		return fmt.Errorf("%s: %s", at, tame(PlainFlagError(err).Error(), []string{value}))
	}
	return nil
}

// scalarText returns a value as text for a flag; it joins lists with commas.
func scalarText(n ast.Node) (string, error) {
	switch v := n.(type) {
	case *ast.SequenceNode:
		var parts []string
		for _, e := range v.Values {
			s, err := scalarText(e)
			if err != nil {
				return "", err
			}
			parts = append(parts, s)
		}
		return strings.Join(parts, ","), nil
	case *ast.NullNode:
		return "", errors.New("a value is missing")
	case *ast.StringNode:
		return v.Value, nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return n.GetToken().Value, nil
	case *ast.LiteralNode:
		return v.Value.Value, nil
	}
	return "", fmt.Errorf("a plain value or a list of them is needed, not %s", strings.ToLower(n.Type().String()))
}
