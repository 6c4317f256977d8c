{{/* Names, labels and addresses. Everything carries the release, so that two of them in one
namespace never touch. */}}

{{- define "leeway.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 34 characters: KubeRay appends up to 20 to a RayService, a StatefulSet 11 to its own. A
longer name keeps its beginning and gets a hash of the whole, so that two long names stay apart. */}}
{{- define "leeway.fullname" -}}
{{- $name := include "leeway.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- $full = .Values.fullnameOverride | default $full -}}
{{- if gt (len $full) 34 -}}
{{- $full = printf "%s-%s" ($full | trunc 25 | trimSuffix "-") ($full | sha256sum | trunc 8) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/* The run: its directory and its keys in Redis. The namespace is part of it, because an outside
Redis may serve releases of one name in several namespaces. */}}
{{- define "leeway.run" -}}
{{- $run := .Values.run.name | default (printf "%s-%s" .Release.Namespace (include "leeway.fullname" .)) -}}
{{- if gt (len $run) 63 -}}
{{- $run = printf "%s-%s" ($run | trunc 54) ($run | sha256sum | trunc 8) -}}
{{- end -}}
{{- $run -}}
{{- end -}}

{{- define "leeway.runDir" -}}
/var/lib/leeway/runs/{{ include "leeway.run" . }}
{{- end -}}

{{/* (root, component): what selectors hold. They can never change, so no label of a user is here. */}}
{{- define "leeway.selectorLabels" -}}
app.kubernetes.io/name: {{ include "leeway.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* (root, component): labels of objects. */}}
{{- define "leeway.labels" -}}
{{- $own := include "leeway.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63) -}}
{{- $_ := set $own "app.kubernetes.io/version" (.root.Chart.AppVersion | toString) -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "leeway" -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- mergeOverwrite (dict) .root.Values.commonLabels $own | toYaml -}}
{{- end -}}

{{/* (root, component, values): labels of pods. The versions of chart and images are not among them: a
new chart that changes nothing else restarts nothing. */}}
{{- define "leeway.podLabels" -}}
{{- $own := include "leeway.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "leeway" -}}
{{- mergeOverwrite (dict) .root.Values.commonLabels .values.podLabels $own | toYaml -}}
{{- end -}}

{{/* (root, component, suffix, annotations): the metadata of an object. */}}
{{- define "leeway.metadata" -}}
name: {{ include "leeway.fullname" .root }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "leeway.labels" . | nindent 2 }}
{{- with mergeOverwrite (dict) .root.Values.commonAnnotations (.annotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (root, image, outside): registry/repository:tag, or @digest where there is one. An outside image
takes neither registry nor tag of Leeway's. */}}
{{- define "leeway.image" -}}
{{- $shared := .outside | default false | ternary (dict) .root.Values.image -}}
{{- $registry := .image.registry | default $shared.registry -}}
{{- $tag := $shared.tag | default .root.Chart.AppVersion -}}
{{- with .image.variant }}{{ $tag = printf "%s-%s" $tag . }}{{ end -}}
{{- $tag = .image.tag | default $tag -}}
{{- with $registry }}{{ . }}/{{ end }}{{ .image.repository }}{{ with .image.digest }}@{{ . }}{{ else }}:{{ $tag }}{{ end }}
{{- end -}}

{{- define "leeway.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "leeway.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "leeway.configMapName" -}}
{{- .Values.existingConfigMap | default (printf "%s-config" (include "leeway.fullname" .)) -}}
{{- end -}}

{{/* Rendered into pods, so that a new configuration restarts them. An existing ConfigMap is not
read: restart the pods yourself after changing it. */}}
{{- define "leeway.configChecksum" -}}
{{- .Values.existingConfigMap | default .Values.config | sha256sum -}}
{{- end -}}
