{{/* One pod template for every component: what is asked of each pod is written once. */}}

{{/* (root, values): the component's own security context over the one of all pods. */}}
{{- define "leeway.podSecurityContext" -}}
{{- mergeOverwrite (deepCopy .root.Values.podSecurityContext) .values.podSecurityContext | toYaml -}}
{{- end -}}

{{- define "leeway.securityContext" -}}
{{- mergeOverwrite (deepCopy .root.Values.securityContext) .values.securityContext | toYaml -}}
{{- end -}}

{{/* (base, extra): lists joined, one entry for each name; the extra one wins in the place of the
first. Helm 4 and the API server refuse two of a name. */}}
{{- define "leeway.byName" -}}
{{- $names := list -}}
{{- $entries := dict -}}
{{- range concat .base .extra -}}
{{- if not (hasKey $entries .name) -}}{{- $names = append $names .name -}}{{- end -}}
{{- $_ := set $entries .name . -}}
{{- end -}}
{{- $joined := list -}}
{{- range $names -}}{{- $joined = append $joined (get $entries .) -}}{{- end -}}
{{- toYaml $joined -}}
{{- end -}}

{{/* (probe, handler): the values' probe; the chart's handler unless the values bring one. */}}
{{- define "leeway.probe" -}}
{{- $probe := deepCopy .probe -}}
{{- if not (or $probe.httpGet $probe.exec $probe.tcpSocket $probe.grpc) -}}
{{- $probe = merge $probe .handler -}}
{{- end -}}
{{- toYaml $probe -}}
{{- end -}}

{{/* (root, component, values): each constraint, counting this component's pods unless it says
which. */}}
{{- define "leeway.topologySpread" -}}
{{- $mine := dict "matchLabels" (include "leeway.selectorLabels" . | fromYaml) -}}
{{- $constraints := list -}}
{{- range .values.topologySpreadConstraints -}}
{{- $constraints = append $constraints (merge (deepCopy .) (dict "labelSelector" $mine)) -}}
{{- end -}}
{{- toYaml $constraints -}}
{{- end -}}

{{/* Resources with every quantity as text, as the API server stores it: a number of YAML is a float,
so that 1e9 would change its form, and older servers take none from Helm 4. */}}
{{- define "leeway.resources" -}}
{{- $found := dict -}}
{{- range $kind, $quantities := . -}}
{{- if kindIs "map" $quantities -}}
{{- $texts := dict -}}
{{- range $name, $quantity := $quantities -}}
{{- if not (kindIs "invalid" $quantity) -}}{{- $_ := set $texts $name (toString $quantity) -}}{{- end -}}
{{- end -}}
{{- $quantities = $texts -}}
{{- end -}}
{{- $_ := set $found $kind $quantities -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* (root, component, values, container, volumes, init, annotations, hasApiToken)

container: name, image, imagePullPolicy, command, args, ports, env, mounts, and the handlers
liveness, readiness, startup. volumes, init: lists of the component's own. */}}
{{- define "leeway.podTemplate" -}}
{{- $v := .values -}}
{{- $c := .container -}}
metadata:
  labels:
    {{- include "leeway.podLabels" . | nindent 4 }}
  {{- with mergeOverwrite (dict) .root.Values.commonAnnotations (.annotations | default dict) $v.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "leeway.serviceAccountName" .root }}
  automountServiceAccountToken: {{ .hasApiToken | default .root.Values.serviceAccount.automount }}
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $v.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds | int64 }}
  securityContext:
    {{- include "leeway.podSecurityContext" . | nindent 4 }}
  {{- with concat (.init | default list) $v.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $c.name }}
      image: {{ $c.image | quote }}
      imagePullPolicy: {{ $c.imagePullPolicy }}
      {{- with $c.command }}
      command:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $c.args }}
      args:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $c.ports }}
      ports:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        {{- include "leeway.byName" (dict "base" $c.env "extra" $v.extraEnv) | nindent 8 }}
      {{- with $v.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if and $c.liveness $v.livenessProbe }}
      livenessProbe:
        {{- include "leeway.probe" (dict "probe" $v.livenessProbe "handler" $c.liveness) | nindent 8 }}
      {{- end }}
      {{- if and $c.readiness $v.readinessProbe }}
      readinessProbe:
        {{- include "leeway.probe" (dict "probe" $v.readinessProbe "handler" $c.readiness) | nindent 8 }}
      {{- end }}
      {{- if and $c.startup $v.startupProbe }}
      startupProbe:
        {{- include "leeway.probe" (dict "probe" $v.startupProbe "handler" $c.startup) | nindent 8 }}
      {{- end }}
      resources:
        {{- include "leeway.resources" $v.resources | nindent 8 }}
      securityContext:
        {{- include "leeway.securityContext" . | nindent 8 }}
      volumeMounts:
        {{- concat $c.mounts $v.extraVolumeMounts | toYaml | nindent 8 }}
    {{- with $v.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "leeway.byName" (dict "base" .volumes "extra" $v.extraVolumes) | nindent 4 }}
  {{- with $v.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $v.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- include "leeway.topologySpread" . | nindent 4 }}
  {{- end }}
{{- end -}}
