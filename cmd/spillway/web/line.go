// Command web is the planner in the browser. Compiled for GOOS=js it runs one command line of
// spillway plan; elsewhere it builds the folder of static files that call it.
package main

import (
	"errors"
	"strings"
)

// split splits a command line into words as a shell does, with quotes, backslashes and continued
// lines, but without variables and patterns. It accepts continued lines whose line ends are lost.
func split(line string) (words []string, err error) {
	var word strings.Builder
	var quote rune
	begun, escaped := false, false
	for _, r := range line {
		switch {
		case escaped:
			escaped = false
			switch {
			case r == '\n' && quote == 0: // the line continues
			case !begun && strings.ContainsRune(" \t\r", r): // a continued line without its line end, as in an address
			case quote == '"' && !strings.ContainsRune("$`\"\\\n", r):
				word.WriteString(`\` + string(r))
			default:
				begun = true
				word.WriteRune(r)
			}
		case r == '\\' && quote != '\'':
			escaped = true
		case r == quote:
			quote = 0
		case quote == 0 && (r == '\'' || r == '"'):
			quote, begun = r, true
		case quote == 0 && strings.ContainsRune(" \t\r\n", r):
			if begun {
				words = append(words, word.String())
			}
			word.Reset()
			begun = false
		default:
			begun = true
			word.WriteRune(r)
		}
	}
	if quote != 0 || escaped {
		return nil, errors.New("the command line: a quote or backslash is left open; close it")
	}
	if begun {
		words = append(words, word.String())
	}
	return words, nil
}

// command returns the words of a command line of spillway. It adds a missing "plan", removes
// "spillway", and replaces train, which plan prints, by plan.
func command(line string) ([]string, error) {
	words, err := split(line)
	if err != nil {
		return nil, err
	}
	for len(words) > 0 && (words[0] == "$" || words[0] == "spillway") {
		words = words[1:]
	}
	if len(words) == 0 || strings.HasPrefix(words[0], "-") {
		words = append([]string{"plan"}, words...)
	}
	if words[0] == "train" {
		words[0] = "plan"
	}
	return words, nil
}

// fill returns the last value of each of the form's flags among words, and the other words. Every
// flag of the form has a value.
func fill(words, form []string) (values map[string]string, rest []string) {
	values = map[string]string{}
	of := map[string]bool{}
	for _, name := range form {
		of["--"+name] = true
	}
	for i := 0; i < len(words); i++ {
		name, value, joined := strings.Cut(words[i], "=")
		switch {
		case !of[name]:
			rest = append(rest, words[i])
			continue
		case !joined && i+1 < len(words):
			i++
			value = words[i]
		}
		values[strings.TrimPrefix(name, "--")] = value
	}
	return values, rest
}
